"""Operators that a device may have fused: nn/ asks here, and does in plain torch what is not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device.transfer import upload


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose the rows of a flat batch are, and where their keys and values lie: what fused attention is told."""

    stops: list[int]
    """The row behind each sequence's last, ascending."""
    lengths: list[int]
    """Tokens of each sequence whose keys and values are in the cache, those of the rows too."""
    blocks: Tensor
    """int32 [sequences, most blocks of one], on the device; what a sequence does not have is any block."""
    singles: list[int]
    """The sequences with one row each."""
    single_rows: Tensor
    """int64 [singles]: their rows, on the device."""
    single_sequences: Tensor
    """int64 [singles]: `singles`, on the device."""

    @classmethod
    def build(
        cls, counts: Sequence[int], lengths: Sequence[int], blocks: Sequence[Sequence[int]], device: torch.device
    ) -> Rows:
        """For sequences with so many rows, so many tokens, and these blocks each."""
        stops = [*accumulate(counts)]
        singles = [number for number, count in enumerate(counts) if count == 1]
        rows = torch.tensor([stops[number] - 1 for number in singles], dtype=torch.int64)
        numbers = torch.tensor(singles, dtype=torch.int64)
        return cls(
            stops,
            [*lengths],
            upload(block_table(blocks, 0).astype(np.int32), device),
            singles,
            upload(rows, device),
            upload(numbers, device),
        )


def block_table(blocks: Sequence[Sequence[int]], padding: int) -> NDArray[np.int64]:
    """The blocks of each sequence in a row, with `padding` behind them: int64 [sequences, most blocks of one]."""
    table = np.full((len(blocks), max(map(len, blocks))), padding, np.int64)
    for row, held in zip(table, blocks, strict=True):
        row[: len(held)] = held
    return table


class Kernels:
    """A device's fused operators. This base has none: attention is then nn/'s, in plain torch."""

    def attends(self, query: Tensor, keys: Tensor, values: Tensor, num_sequences: int, longest: int) -> bool:
        """Whether `attend` takes queries [heads, T, head_dim] over pages [blocks, block_size, kv_heads, head_dim].

        Of so many sequences, of which the longest has so many tokens.
        """
        return False

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
        """Causal attention of each row to its own sequence's pages.

        query [heads, T, head_dim]; keys and values [blocks, block_size, kv_heads, head_dim]; [T, heads, head_dim].
        """
        raise NotImplementedError

    def store(self, pages: Tensor, slots: Tensor, new: Tensor) -> None:
        """Writes new [T, kv_heads, head_dim] to slots int64 [T] of pages [blocks, block_size, kv_heads, head_dim]."""
        pages.flatten(0, 1).index_copy_(0, slots, new)
