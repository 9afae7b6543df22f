"""The pool of KV blocks. It records each block's key and how many sequences use the block."""

from __future__ import annotations

from collections import OrderedDict, abc

from mindie_mm.engine.requests.sequence import Sequence


class BlockPool:
    """A pool of KV blocks of one size. Sequences allocate blocks as they grow.

    A full block can have a key (`prefix.py`), by which other sequences can find and share it. A free block keeps its
    key until it is allocated again. Allocation takes blocks without a key first, and then the least recently freed
    blocks. It continues with the block after the sequence's last block if that block is free and nothing recent is lost
    by this, because attention reads consecutive blocks without copying them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._num_freed = 0
        self._freed_at = [-num_blocks] * num_blocks
        """Value of `_num_freed` when each block was freed."""
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use, in [0, 1]."""
        return 1 - len(self._free) / self.num_blocks

    def num_needed(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find(self, keys: abc.Iterable[bytes]) -> list[int]:
        """Return the blocks of `keys` in order, up to the first key that no block has."""
        blocks: list[int] = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def can_grow(self, sequence: Sequence, num_tokens: int, shared: abc.Sequence[int] = ()) -> bool:
        """Return whether enough blocks are free to let `sequence` share `shared` and grow to `num_tokens` tokens."""
        free = len(self._free) - sum(not self._holders[block] for block in shared)
        return self.num_needed(num_tokens) - len(sequence.kv_blocks) - len(shared) <= free

    def share(self, sequence: Sequence, blocks: abc.Sequence[int]) -> None:
        """Add blocks from `find` to `sequence`, which must not have blocks yet."""
        assert not sequence.kv_blocks, sequence.kv_blocks
        for block in blocks:
            self._hold(sequence, block)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks that `sequence` lacks for `num_tokens` tokens in total. Call `can_grow` first."""
        for _ in range(self.num_needed(num_tokens) - len(sequence.kv_blocks)):
            block = self._next(sequence)
            self.forget([block])
            self._hold(sequence, block)

    def keep(self, block: int, key: bytes) -> None:
        """Assign a key to a full block, unless another block has this key already."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, blocks: abc.Iterable[int]) -> None:
        """Remove the keys of `blocks`. Sequences that use the blocks keep them, but `find` does not return them."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of `sequence`."""
        # Free in reverse order, so that later blocks are reused first. A block is useless without the prefix before it.
        for block in reversed(sequence.kv_blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                self._num_freed += 1
                self._freed_at[block] = self._num_freed
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)
        sequence.kv_blocks.clear()

    def _next(self, sequence: Sequence) -> int:
        """Return the free block to allocate next for `sequence`."""
        oldest: int = next(iter(self._free))
        if not sequence.kv_blocks or (after := sequence.kv_blocks[-1] + 1) not in self._free:
            return oldest
        freed_since = self._num_freed - self._freed_at[after]
        is_old = freed_since >= len(self._free) // 2
        return after if is_old or after not in self._keys else oldest

    def _hold(self, sequence: Sequence, block: int) -> None:
        self._free.pop(block, None)
        self._holders[block] += 1
        sequence.kv_blocks.append(block)
