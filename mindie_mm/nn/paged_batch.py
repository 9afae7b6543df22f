"""A flat batch of sequences over a paged KV cache: which rows belong together, where their keys and values are kept.

A flat batch lays the tokens of all its sequences in one row: transformers' decoder sees a batch of one, [1, T].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Rows, block_table, upload, zeros


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values of every layer, in blocks that sequences hold in any order."""

    keys: tuple[Tensor, ...]
    """Per layer: [blocks + 1, block_size, kv_heads, head_dim]; the last one pads, and stays zero."""
    values: tuple[Tensor, ...]
    """The same for the values, which can be of another width."""
    block_size: int
    """Tokens in a block."""

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedCache:
        """Zeroed pages: a block's unused tail is read (masked), so it must hold numbers. See `clear`."""
        shape = (num_blocks + 1, block_size, num_kv_heads)
        keys, values = (
            tuple(zeros((*shape, width), dtype, device) for _ in range(num_layers))
            for width in (head_dim, value_head_dim)
        )
        return cls(keys, values, block_size)

    @property
    def padding(self) -> int:
        """The block that no sequence holds."""
        return len(self.keys[0]) - 1

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks that are about to be filled in part.

        What an earlier sequence left behind the part would be masked, but its weight of nought times a NaN is a NaN.
        """
        if blocks:
            which = upload(torch.tensor(blocks, dtype=torch.int64), self.keys[0].device)
            for pages in (*self.keys, *self.values):
                # Not index_fill_: CANN's writes a copy of the whole tensor, and that back into it.
                pages.index_copy_(0, which, pages.new_zeros(len(blocks), *pages.shape[1:]))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a flat batch."""

    start: int
    """Position of the first token in its sequence: as many tokens are in the cache already."""
    stop: int
    """Position behind the last one."""
    blocks: Sequence[int]
    """Blocks of the sequence, enough for `stop` tokens; empty where no cache is kept."""
    span_ids: Tensor | None = None
    """int64 [n], n >= stop: number of the bidirectional span of each token of the sequence, -1: none.

    Tokens of one span attend to each other both ways. A chunk holds the first and the last token of a span, or neither.
    """


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows of a chunk of several tokens."""

    rows: slice
    context: int
    """Tokens before the chunk, to be read from the pages."""
    blocks: Tensor | None
    """int64 [blocks] of the sequence; None without a context."""
    span_ids: Tensor | None
    """int64 [context + rows]: as Chunk's; None where the rows have none."""


class Decode:
    """Rows of sequences with one new token each and contexts of similar length, attended to in one call."""

    def __init__(self, rows: Tensor, blocks: Tensor, lengths: Tensor, num_slots: int) -> None:
        self.rows = rows
        """int64 [S]."""
        self.blocks = blocks
        """int64 [S * blocks], padded with the cache's block for that."""
        self._lengths = lengths.view(-1, 1, 1, 1)
        self._num_slots = num_slots
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """[S, 1, 1, slots]: which tokens of its blocks a row attends to, made once for all layers.

        bool; on the host numbers of `dtype` to be added to the scores, which its kernel else makes in every layer.
        """
        key = sliding_window, dtype
        if key not in self._masks:
            to = torch.arange(self._num_slots, device=self.rows.device)
            mask = to < self._lengths
            if sliding_window is not None:
                mask &= to >= self._lengths - sliding_window
            if mask.device.type == "cpu":
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
            self._masks[key] = mask
        return self._masks[key]


class PagedBatch:
    """Which rows of a flat batch attend to what. Built once a step, read by every layer."""

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache | None, device: torch.device) -> None:
        """The batch of `chunks`, whose tokens lie one behind another in the flat row.

        `cache` None: nothing is kept, every chunk is a whole sequence.
        """
        self.cache = cache
        self.num_sequences = len(chunks)
        self.longest = max((chunk.stop for chunk in chunks), default=0)
        """Tokens of the longest sequence."""
        self._chunks = chunks
        self._device = device
        self.slots = None if cache is None else upload(_slots(chunks, cache.block_size), device)
        """int64 [T]: the token's place in the flattened cache."""
        self.is_causal = all(not _is_in_span(chunk) for chunk in chunks)
        """Whether no row attends to one behind it."""

    @cached_property
    def rows(self) -> Rows:
        """As fused attention takes them."""
        chunks = self._chunks
        return Rows.build(
            [chunk.stop - chunk.start for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.blocks for chunk in chunks],
            self._device,
        )

    @cached_property
    def prefills(self) -> list[Prefill]:
        """The chunks that are attended to one by one."""
        return [_prefill_of(chunk, row, self._device) for chunk, row in self._placed() if not self._is_decode(chunk)]

    @cached_property
    def decodes(self) -> list[Decode]:
        """The chunks of one new token each, together where their contexts are of similar length."""
        groups: dict[int, list[tuple[int, Chunk]]] = {}
        for chunk, row in self._placed():
            if self._is_decode(chunk):
                # Powers of two bound what padding to the longest of a group costs to a factor of two.
                groups.setdefault(len(chunk.blocks).bit_length(), []).append((row, chunk))
        if self.cache is None:
            return []
        return [_decode_group(group, self.cache, self._device) for group in groups.values()]

    def _placed(self) -> Iterator[tuple[Chunk, int]]:
        """Each chunk with its first row."""
        row = 0
        for chunk in self._chunks:
            yield chunk, row
            row += chunk.stop - chunk.start

    def _is_decode(self, chunk: Chunk) -> bool:
        return self.cache is not None and chunk.stop - chunk.start == 1 and chunk.start > 0


class GraphBatch(PagedBatch):
    """One new token of each sequence, in tensors that are written anew before each launch of a captured graph."""

    def __init__(self, cache: PagedCache, slots: Tensor, blocks: Tensor, lengths: Tensor) -> None:
        """slots int64 [S]; blocks int64 [S, n], padded with the cache's block for that; lengths int64 [S]."""
        self.cache = cache
        self.num_sequences = len(slots)
        self.longest = blocks.shape[1] * cache.block_size
        self.slots = slots
        self.is_causal = True
        self.prefills = []
        rows = torch.arange(len(slots), device=slots.device)
        self.decodes = [Decode(rows, blocks.flatten(), lengths, blocks.shape[1] * cache.block_size)]


def _slots(chunks: Sequence[Chunk], block_size: int) -> NDArray[np.int64]:
    slots: list[NDArray[np.int64] | list[int]] = []
    for chunk in chunks:
        first, within = divmod(chunk.start, block_size)
        if chunk.stop - chunk.start == 1:  # a token being decoded: every step comes here for every sequence
            slots.append([chunk.blocks[first] * block_size + within])
        else:
            own = np.asarray(chunk.blocks[first : -(-chunk.stop // block_size)], np.int64)
            places = np.add.outer(own * block_size, np.arange(block_size)).ravel()
            slots.append(places[within : within + chunk.stop - chunk.start])
    return np.concatenate(slots)


def _is_in_span(chunk: Chunk) -> bool:
    return chunk.span_ids is not None and bool((chunk.span_ids[chunk.start : chunk.stop] >= 0).any())


def _prefill_of(chunk: Chunk, row: int, device: torch.device) -> Prefill:
    return Prefill(
        slice(row, row + chunk.stop - chunk.start),
        chunk.start,
        upload(torch.tensor(chunk.blocks), device) if chunk.start else None,
        _span_ids(chunk, device),
    )


def _span_ids(chunk: Chunk, device: torch.device) -> Tensor | None:
    """Numbers of the chunk's context and rows; None for rows that attend causally alone, as decodes do."""
    if chunk.span_ids is None or not _is_in_span(chunk):
        return None
    missing = max(0, chunk.stop - len(chunk.span_ids))  # output tokens, where a preempted sequence comes again
    return upload(torch.nn.functional.pad(chunk.span_ids[: chunk.stop], (0, missing), value=-1), device)


def _decode_group(group: Sequence[tuple[int, Chunk]], cache: PagedCache, device: torch.device) -> Decode:
    table = block_table([chunk.blocks for _, chunk in group], cache.padding)
    return Decode(
        upload([row for row, _ in group], device),
        upload(table.ravel(), device),
        upload([chunk.stop for _, chunk in group], device),
        table.shape[1] * cache.block_size,
    )
