"""The interface of fused operators. `nn/` uses plain PyTorch for calls that a device does not support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device.transfer import upload


@dataclass(frozen=True)
class Rows:
    """The rows of a flat batch and their KV blocks, in the form that fused attention needs.

    Tensors are created when they are first read, because not every device needs them.
    """

    stops: list[int]
    """Index after the last row of each sequence, ascending."""
    lengths: list[int]
    """Number of tokens of each sequence in the cache, including the rows of this batch."""
    first_slots: list[int | None]
    """Index of each sequence's first token in the flattened cache. None if its KV blocks are not consecutive."""
    singles: list[int]
    """Indices of the sequences with exactly one row."""
    _held: Sequence[Sequence[int]]
    _device: torch.device

    @classmethod
    def build(
        cls,
        counts: Sequence[int],
        lengths: Sequence[int],
        blocks: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> Rows:
        """Build the rows of a batch.

        Args:
            counts: Number of rows of each sequence.
            lengths: Number of tokens of each sequence in the cache, including its rows.
            blocks: KV blocks of each sequence.
            block_size: Number of tokens in a KV block.
            device: Device of the resulting tensors.

        """
        return cls(
            [*accumulate(counts)],
            [*lengths],
            [held[0] * block_size if _are_consecutive(held) else None for held in blocks],
            [number for number, count in enumerate(counts) if count == 1],
            blocks,
            device,
        )

    @cached_property
    def blocks(self) -> Tensor:
        """KV blocks of each sequence, int32 [sequences, max_blocks], on the device. The padding may be any block."""
        return upload(block_table(self._held, 0).astype(np.int32), self._device)

    @cached_property
    def single_rows(self) -> Tensor:
        """Rows of the sequences in `singles`, int64 [singles], on the device."""
        return upload(
            torch.tensor([self.stops[number] - 1 for number in self.singles], dtype=torch.int64), self._device
        )

    @cached_property
    def single_sequences(self) -> Tensor:
        """Copy of `singles` on the device, int64 [singles]."""
        return upload(torch.tensor(self.singles, dtype=torch.int64), self._device)


def _are_consecutive(blocks: Sequence[int]) -> bool:
    return all(next_block - block == 1 for block, next_block in pairwise(blocks))


def block_table(blocks: Sequence[Sequence[int]], padding: int) -> NDArray[np.int64]:
    """Return the KV blocks of each sequence in one row, padded on the right, int64 [sequences, max_blocks]."""
    table = np.full((len(blocks), max(map(len, blocks))), padding, np.int64)
    for row, held in zip(table, blocks, strict=True):
        row[: len(held)] = held
    return table


class Kernels:
    """The fused operators of a device. This base class has no fused attention, so `nn/` uses plain PyTorch."""

    has_attention: ClassVar[bool] = False
    """Whether `attend` is implemented. If not, no batch builds the `Rows` that it needs."""

    def attends(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> bool:
        """Return whether `attend` supports these arguments, which it describes, and is faster than plain PyTorch."""
        return False

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
        """Compute the causal attention of each row to the KV blocks of its own sequence.

        Args:
            query: [heads, T, head_dim].
            keys: Pages of the keys, [blocks, block_size, kv_heads, head_dim].
            values: Pages of the values, [blocks, block_size, kv_heads, value_head_dim].
            rows: The sequences that the rows belong to, and the KV blocks of each sequence.
            scaling: Factor by which the attention scores are multiplied.

        Returns:
            [T, heads, value_head_dim].

        """
        raise NotImplementedError

    def store(self, pages: Tensor, slots: Tensor, new: Tensor) -> None:
        """Write new keys or values to their places in the pages.

        Args:
            pages: [blocks, block_size, kv_heads, head_dim], changed in place.
            slots: Indices into the flattened first two axes of `pages`, int64 [T].
            new: [T, kv_heads, head_dim].

        """
        pages.flatten(0, 1).index_copy_(0, slots, new)
