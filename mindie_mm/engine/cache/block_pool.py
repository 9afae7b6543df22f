"""The KV cache's blocks: who holds which, and what those hold that nobody holds any more."""

from __future__ import annotations

from collections import OrderedDict, abc

from mindie_mm.engine.requests.sequence import Sequence


class BlockPool:
    """Blocks of one size, handed to sequences as they grow.

    A full block can have a key (`prefix.py`) under which further sequences find and hold it too. It keeps its key when
    it is let go, until it is handed out anew; those without a key go first, then those let go longest ago.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]."""
        return 1 - len(self._free) / self.num_blocks

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def find(self, keys: abc.Iterable[bytes]) -> list[int]:
        """The blocks of the first of `keys`, up to one that no block has."""
        found: list[int] = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            found.append(block)
        return found

    def can_grow(self, sequence: Sequence, num_tokens: int, shared: abc.Sequence[int] = ()) -> bool:
        """Whether `sequence`, given the blocks `shared` first, can hold `num_tokens` in all."""
        free = len(self._free) - sum(not self._holders[block] for block in shared)
        return self.num_needed(num_tokens) - len(sequence.blocks) - len(shared) <= free

    def share(self, sequence: Sequence, blocks: abc.Sequence[int]) -> None:
        """Gives `sequence`, which has none yet, blocks that `find` found."""
        assert not sequence.blocks, sequence.blocks
        for block in blocks:
            self._hold(sequence, block)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives `sequence` the blocks that `num_tokens` in all take; ask `can_grow` first."""
        for _ in range(self.num_needed(num_tokens) - len(sequence.blocks)):
            block = next(iter(self._free))
            self.forget([block])
            self._hold(sequence, block)

    def keep(self, block: int, key: bytes) -> None:
        """Gives a full block its key; where another has it already, that one stays the one to be found."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, blocks: abc.Iterable[int]) -> None:
        """Takes the keys of `blocks`: who holds them keeps them, nobody else finds them."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]

    def free(self, sequence: Sequence) -> None:
        """Takes every block back."""
        # The last ones first: a prefix is of use without what follows it, and not the other way round.
        for block in reversed(sequence.blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)
        sequence.blocks.clear()

    def _hold(self, sequence: Sequence, block: int) -> None:
        self._free.pop(block, None)
        self._holders[block] += 1
        sequence.blocks.append(block)
