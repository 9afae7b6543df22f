"""The interface of fused operators. `nn/` uses plain PyTorch for calls that a device does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from mindie_mm.device import joined_experts
from mindie_mm.device.joined_experts import ExpertWeights
from mindie_mm.device.transfer import Uploads


@dataclass(frozen=True)
class Rows:
    """The rows of a flat batch and their KV blocks, in the form that fused attention needs."""

    stops: list[int]
    """Index after the last row of each sequence, ascending."""
    lengths: list[int]
    """Number of tokens of each sequence in the cache, including the rows of this batch."""
    first_slots: list[int | None]
    """Index of each sequence's first token in the flattened cache. None if its KV blocks are not consecutive."""
    singles: list[int]
    """Indices of the sequences with exactly one row."""
    _blocks: Callable[[], Tensor]
    _single_rows: Callable[[], Tensor]
    _single_sequences: Callable[[], Tensor]

    @classmethod
    def build(
        cls,
        counts: Sequence[int],
        lengths: Sequence[int],
        blocks: Sequence[Sequence[int]],
        block_size: int,
        uploads: Uploads,
    ) -> Rows:
        """Build the rows of a batch.

        Args:
            counts: Number of rows of each sequence.
            lengths: Number of tokens of each sequence in the cache, including its rows.
            blocks: KV blocks of each sequence.
            block_size: Number of tokens in a KV block.
            uploads: Copies to the device of the resulting tensors. On the CPU, the rows have no tensors.

        """
        stops = [*accumulate(counts)]
        singles = [number for number, count in enumerate(counts) if count == 1]
        on_device = uploads.device.type != "cpu"
        mixed = on_device and 0 < len(singles) < len(stops)
        return cls(
            stops,
            [*lengths],
            [held[0] * block_size if _are_consecutive(held) else None for held in blocks],
            singles,
            uploads.add(block_table(blocks, 0).astype(np.int32) if on_device else ()),
            uploads.add(np.array([stops[number] - 1 for number in singles], np.int64) if mixed else ()),
            uploads.add(np.array(singles, np.int64) if mixed else ()),
        )

    @classmethod
    def of_table(cls, table: Tensor, lengths: Sequence[int]) -> Rows:
        """Describe one row for each of S sequences, with the KV blocks in `table`, int64 [S, n]."""
        count = len(lengths)
        stops, singles = [*range(1, count + 1)], [*range(count)]
        blocks = cache(lambda: table.to(torch.int32))  # once for all layers
        return cls(stops, [*lengths], [None] * count, singles, blocks, table.new_empty, table.new_empty)

    @property
    def blocks(self) -> Tensor:
        """KV blocks of each sequence, int32 [sequences, max_blocks], on the device. The padding may be any block."""
        return self._blocks()

    @property
    def single_rows(self) -> Tensor:
        """Rows of the sequences in `singles`, int64 [singles], on the device, for batches with other sequences."""
        return self._single_rows()

    @property
    def single_sequences(self) -> Tensor:
        """Copy of `singles` on the device, int64 [singles], for batches with other sequences."""
        return self._single_sequences()


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
    """True if `attend` is implemented. If not, no batch builds the `Rows` that it needs."""
    counts_launches: ClassVar[bool] = False
    """True if the number of operators determines the time of sampling, and not the work of sorting a vocabulary."""
    has_layers: ClassVar[bool] = False
    """True if the operators of decoder layers, from `rms_norm` to `swiglu`, are fused."""
    attends_in_graphs: ClassVar[bool] = False
    """True if graphs may capture `attend`. If so, each launch of a graph replaces the lengths of `Rows`."""
    joins_experts: ClassVar[bool] = True
    """True if `experts` multiplies the joined weights of all experts.

    If not, each expert has linear layers of its own, and the host waits for the selection.
    """
    rounds_experts: ClassVar[bool] = False
    """True if `experts` also multiplies int8 weights. If not, the weights of transformers' experts are dequantized."""

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
            scaling: Factor for the attention scores.

        Returns:
            [T, heads, value_head_dim].

        """
        raise NotImplementedError

    def ignores_rest(self, keys: Tensor, heads: int) -> bool:
        """Return whether `attend` supports all batches with these heads, and never reads the rest of a block.

        The rest of a block are its tokens after the length of the sequence. They may be NaN.

        Args:
            keys: Pages of the keys, as in `attend`. Those of the values have the same shape.
            heads: Number of heads of the query.

        """
        return False

    def store(self, pages: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write new keys and values to their places in the pages.

        Args:
            pages: Pages of the keys and of the values, as in `attend`, changed in place.
            slots: Indices into the flattened first two axes of the pages, int64 [T].
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, value_head_dim].

        """
        for part, new in zip(pages, (key, value), strict=True):
            part.flatten(0, 1).index_copy_(0, slots, new.to(part.dtype))

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply RMS normalization with `weight` [width] to `hidden` [..., width]. The statistics are in float32."""
        values = hidden.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return weight * values.to(hidden.dtype)

    def add_rms_norm(self, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the RMS normalization of `hidden + added`, as in `rms_norm`, and the sum."""
        total = hidden + added
        return self.rms_norm(total, weight, eps), total

    def split(self, joined: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Split [T, width] into contiguous parts with these widths."""
        return [part.contiguous() for part in joined.split_with_sizes([*widths], 1)]

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings, and return the rotated query and key. The arguments may be changed in place.

        The first half of each head pairs with the second half.

        Args:
            query: [T, heads, head_dim].
            key: [T, kv_heads, head_dim].
            cos: [T, head_dim].
            sin: [T, head_dim].

        """
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    def swiglu(self, joined: Tensor) -> Tensor:
        """Return `silu(gate) * up`, [T, width], for gate and up side by side, [T, 2 * width]."""
        gate, up = joined.chunk(2, -1)
        return silu(gate) * up

    def experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, [T, width].

        The sum of a row does not depend on the other rows, up to rounding.

        Args:
            hidden: [T, width].
            chosen: The experts of each row, int64 [T, count].
            weights: The weights of the experts' outputs, [T, count], of any float dtype.
            experts: The experts of the layer, or of this rank.

        """
        return joined_experts.weighted_sum(joined_experts.run(hidden, chosen, experts), weights)


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return values * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)
