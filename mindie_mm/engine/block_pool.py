"""The KV cache's blocks: who holds which."""

from __future__ import annotations

from mindie_mm.engine.sequence import Sequence


class BlockPool:
    """Blocks of one size, handed to sequences as they grow."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def usage(self) -> float:
        """Share of the blocks in use, in [0, 1]."""
        return 1 - len(self._free) / self.num_blocks

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `sequence` can hold `num_tokens` in all."""
        return self.num_needed(num_tokens) - len(sequence.blocks) <= len(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives `sequence` the blocks that `num_tokens` in all take; ask `can_grow` first."""
        for _ in range(self.num_needed(num_tokens) - len(sequence.blocks)):
            sequence.blocks.append(self._free.pop())

    def free(self, sequence: Sequence) -> None:
        """Takes every block back."""
        self._free += reversed(sequence.blocks)
        sequence.blocks.clear()
