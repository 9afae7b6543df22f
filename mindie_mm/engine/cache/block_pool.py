"""The pool of KV blocks. It records each block's key and how many requests use the block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from mindie_mm.engine.requests.request import Request


class BlockPool:
    """A pool of KV blocks of one size. Requests allocate blocks as they grow.

    A full block can have a key (`prefix.py`), by which other requests can find and share it. A free block keeps its
    key until it is allocated again. Allocation takes blocks without a key first, and then the least recently freed
    blocks. It continues with the block after the request's last block if that block is free and nothing recent is lost
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
        """Share of the blocks that requests use, in [0, 1]."""
        return 1 - len(self._free) / self.num_blocks

    def num_needed(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of `keys` in order, up to the first key that no block has."""
        blocks: list[int] = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def can_grow(self, request: Request, num_tokens: int, shared: Sequence[int] = (), spare: int = 0) -> bool:
        """Return whether enough blocks are free to let `request` share `shared` and grow to `num_tokens` tokens.

        Any blocks that the request lacks must leave `spare` blocks free.
        """
        free = len(self._free) - sum(not self._holders[block] for block in shared)
        lacking = self.num_needed(num_tokens) - len(request.kv_blocks) - len(shared)
        return lacking <= 0 or lacking + spare <= free

    def share(self, request: Request, blocks: Sequence[int]) -> None:
        """Add blocks from `find` to `request`, which must not have blocks yet."""
        assert not request.kv_blocks, request.kv_blocks
        for block in blocks:
            self._hold(request, block)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that `request` lacks for `num_tokens` tokens in total. Call `can_grow` first."""
        for _ in range(self.num_needed(num_tokens) - len(request.kv_blocks)):
            block = self._next(request)
            self.forget([block])
            self._hold(request, block)

    def keep(self, block: int, key: bytes) -> None:
        """Assign a key to a full block, unless another block has this key already."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the keys of `blocks`. Requests that use the blocks keep them, but `find` does not return them."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]

    def free(self, request: Request) -> None:
        """Release all blocks of `request`."""
        # Free in reverse order, so that later blocks are reused first. A block is useless without the prefix before it.
        for block in reversed(request.kv_blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                self._num_freed += 1
                self._freed_at[block] = self._num_freed
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)
        request.kv_blocks.clear()

    def _next(self, request: Request) -> int:
        """Return the free block to allocate next for `request`."""
        oldest: int = next(iter(self._free))
        if not request.kv_blocks or (after := request.kv_blocks[-1] + 1) not in self._free:
            return oldest
        freed_since = self._num_freed - self._freed_at[after]
        is_old = freed_since >= len(self._free) // 2
        return after if is_old or after not in self._keys else oldest

    def _hold(self, request: Request, block: int) -> None:
        self._free.pop(block, None)
        self._holders[block] += 1
        request.kv_blocks.append(block)
