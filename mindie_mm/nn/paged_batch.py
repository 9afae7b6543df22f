"""A flat batch of sequences over a paged KV cache.

A flat batch concatenates the tokens of all its sequences. The decoder receives a flat batch as a batch of size one,
[1, T].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Rows, Uploads, block_table, kernels_of, upload
from mindie_mm.nn.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a flat batch."""

    start: int
    """Index of the first token in the sequence. The cache already contains all earlier tokens."""
    stop: int
    """Index after the last token."""
    blocks: Sequence[int]
    """KV blocks of the sequence, enough for `stop` tokens. Empty without a cache."""
    span_ids: Tensor | None = None
    """Number of the bidirectional span that contains each token of the sequence, or -1, int64 [n].

    Tokens of one span attend to each other in both directions. A chunk contains a span completely or not at all. If n
    is less than `stop`, the remaining tokens are in no span.
    """
    reads: int = 0
    """Slot with the states of recurrent layers after `start` tokens. It is not read if `start` is 0."""
    writes: int = 0
    """Slot for the states after `stop` tokens. It may be the slot that is read."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk whose attention is computed separately from other chunks."""

    rows: slice
    context: int
    """Number of tokens before the chunk. Their keys and values are read from the pages."""
    blocks: Tensor | None
    """Blocks of the sequence, int64 [blocks]. None without a context."""
    span_ids: Tensor | None
    """Has the same meaning as in `Chunk`, int64 [context + rows]. None if no row is in a span."""


@dataclass(frozen=True, slots=True)
class StatePrefill:
    """A chunk that recurrent layers compute separately from other chunks."""

    rows: slice
    reads: int | None
    """Slot that the chunk reads. None if the chunk begins a sequence."""
    writes: int
    """Slot that the chunk writes, if there is a cache."""


@dataclass(frozen=True, slots=True)
class States:
    """The states that recurrent layers read and write in a flat batch."""

    prefills: Sequence[StatePrefill]
    rows: Tensor
    """Rows of the sequences with one new token, int64 [S]."""
    reads: Tensor
    """Slots that these sequences read, int64 [S]."""
    writes: Tensor
    """Slots that these sequences write, int64 [S]."""


class Decode:
    """Rows of S sequences with one new token each and contexts of similar length. One call computes their attention."""

    def __init__(self, rows: Tensor, blocks: Tensor, lengths: Tensor, num_slots: int) -> None:
        self.rows = rows
        """int64 [S]."""
        self.blocks = blocks
        """KV blocks of all sequences, padded to the same number with the padding block, int64 [S * blocks]."""
        self._lengths = lengths.view(-1, 1, 1, 1)
        self._num_slots = num_slots
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the attention mask [S, 1, 1, slots] of the rows over the token slots of their KV blocks.

        All layers share the mask. On accelerators, the mask is bool. On the CPU, it has `dtype` and is added to the
        scores, because the CPU kernel would convert a bool mask in every layer.
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
    """The tokens that each row of a flat batch attends to. A batch is built once per step and read by every layer."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: PagedCache | None,
        device: torch.device,
        top_position: int | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        """Describe a flat batch.

        Args:
            chunks: Chunks in the order of their tokens in the batch.
            cache: The KV cache. None means that every chunk is a whole sequence.
            device: Where the model runs.
            top_position: The result of the function `top_position`, or None if it is not known.
            uploads: Copies to the device. The tensors of the batch are added to them.

        """
        self.cache = cache
        self.top_position = top_position
        self.has_rows = True
        """True if fused attention may read `rows`."""
        self._chunks = chunks
        self._cuts: dict[int, PagedBatch] = {}
        self._device = device
        self._uploads = uploads or Uploads(device)
        self._slots = None if cache is None else self._uploads.add(_slots(chunks, cache.block_size))
        if cache is not None and device.type != "cpu" and kernels_of(device).has_attention:
            self.rows  # noqa: B018 - adds their tensors to the uploads
        self._decode_states = self._uploads.add(self._decode_slots()) if cache is not None and cache.states else None
        self.is_causal = all(not _is_in_span(chunk) for chunk in chunks)
        """True if no row attends to a later row."""

    def cut(self, size: int) -> PagedBatch:
        """Return the batch with each sequence cut into sequences of `size` tokens, for attention within chunks.

        `KVLayer.chunk_size` is such a size.
        """
        if size not in self._cuts:
            self._cuts[size] = self._cut(size)
        return self._cuts[size]

    def _cut(self, size: int) -> PagedBatch:
        if all(chunk.stop <= size for chunk in self._chunks):
            return self
        assert self.is_causal
        num_blocks = 0 if self.cache is None else size // self.cache.block_size
        parts = [part for chunk in self._chunks for part in _parts(chunk, size, num_blocks)]
        return PagedBatch(parts, self.cache, self._device, uploads=self._uploads)

    def decode_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """Return the starts, lengths and KV blocks that `DecodeStep.run` needs, or None if attention is not causal."""
        chunks = self._chunks
        if self.cache is None or not self.is_causal:
            return None
        counts = [chunk.stop - chunk.start for chunk in chunks]
        lengths = [length for chunk in chunks for length in range(chunk.start + 1, chunk.stop + 1)]
        table = block_table([chunk.blocks for chunk in chunks], self.cache.padding)
        if len(lengths) == len(chunks):  # fast path for one new token of each sequence
            return np.arange(len(chunks) + 1), np.array(lengths, np.int64), table
        return np.cumsum([0, *counts]), np.array(lengths, np.int64), np.repeat(table, counts, axis=0)

    @cached_property
    def slots(self) -> Tensor | None:
        """Index of each token in the flattened cache, int64 [T]."""
        return None if self._slots is None else self._slots()

    @cached_property
    def rows(self) -> Rows:
        """The rows in the form that fused attention kernels need."""
        assert self.cache is not None
        chunks = self._chunks
        return Rows.build(
            [chunk.stop - chunk.start for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.blocks for chunk in chunks],
            self.cache.block_size,
            self._uploads,
        )

    @cached_property
    def prefills(self) -> list[Prefill]:
        """The chunks whose attention is computed one chunk at a time."""
        return [_prefill_of(chunk, row, self._device) for chunk, row in self._placed() if not self._is_decode(chunk)]

    @cached_property
    def decodes(self) -> list[Decode]:
        """The chunks that have one new token each, grouped by similar context length."""
        groups: dict[int, list[tuple[int, Chunk]]] = {}
        for chunk, row in self._placed():
            if self._is_decode(chunk):
                # Groups by powers of two limit the cost of padding to a factor of two.
                groups.setdefault(len(chunk.blocks).bit_length(), []).append((row, chunk))
        if self.cache is None:
            return []
        begun = [_decode_group(group, self.cache, self._uploads) for group in groups.values()]
        return [finish() for finish in begun]  # after all have been added to the uploads

    @cached_property
    def states(self) -> States:
        """The states that recurrent layers read and write."""
        prefills = [
            StatePrefill(slice(row, row + chunk.stop - chunk.start), chunk.reads if chunk.start else None, chunk.writes)
            for chunk, row in self._placed()
            if not self._is_decode(chunk)
        ]
        none = torch.zeros(3, 0, dtype=torch.int64)
        return States(prefills, *(none if self._decode_states is None else self._decode_states()))

    def _decode_slots(self) -> NDArray[np.int64]:
        """Return the rows, `reads` and `writes` of the sequences with one new token, int64 [3, S]."""
        slots = [(row, chunk.reads, chunk.writes) for chunk, row in self._placed() if self._is_decode(chunk)]
        return np.array(slots, np.int64).reshape(-1, 3).T

    def _placed(self) -> Iterator[tuple[Chunk, int]]:
        row = 0
        for chunk in self._chunks:
            yield chunk, row
            row += chunk.stop - chunk.start

    def _is_decode(self, chunk: Chunk) -> bool:
        return self.cache is not None and chunk.stop - chunk.start == 1 and chunk.start > 0


class GraphBatch(PagedBatch):
    """A batch with one new token per sequence. Its tensors are overwritten before each launch of a captured graph."""

    def __init__(
        self,
        cache: PagedCache,
        slots: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        host_lengths: Sequence[int],
        state_slots: Tensor,
    ) -> None:
        """Describe a batch of S sequences.

        Args:
            cache: The KV cache.
            slots: Index of each new token in the flattened cache, int64 [S].
            blocks: Blocks of each sequence, int64 [S, n], padded with the cache's padding block.
            lengths: Number of tokens of each sequence, including the new token, int64 [S].
            host_lengths: The same numbers for fused attention that takes them from the host. Each launch of a captured
                graph replaces them.
            state_slots: `Chunk.reads` and `Chunk.writes` of each sequence, int64 [2, S].

        """
        self.cache = cache
        self.top_position = None
        self._slots = lambda: slots
        self.has_rows = kernels_of(slots.device).attends_in_graphs
        self.is_causal = True
        self.prefills = []
        self._blocks = blocks
        self._lengths = lengths
        self._host_lengths = host_lengths
        self._state_slots = state_slots
        self._cuts = {}

    def _cut(self, size: int) -> PagedBatch:
        assert self.cache is not None
        assert self.slots is not None
        num_blocks = size // self.cache.block_size
        if self._blocks.shape[1] <= num_blocks:
            return self
        before = (self._lengths - 1) // size
        columns = before.unsqueeze(1) * num_blocks + torch.arange(num_blocks, device=self._blocks.device)
        blocks = self._blocks.gather(1, columns.clamp_(max=self._blocks.shape[1] - 1))
        cut = GraphBatch(self.cache, self.slots, blocks, self._lengths - before * size, (), self._state_slots)
        cut.has_rows = False  # a launch of the graph replaces the lengths of `Rows` by those of the whole sequences
        return cut

    @cached_property
    def states(self) -> States:
        return States([], torch.arange(len(self._blocks), device=self._blocks.device), *self._state_slots)

    @cached_property
    def rows(self) -> Rows:
        return Rows.of_table(self._blocks, self._host_lengths)

    @cached_property
    def decodes(self) -> list[Decode]:
        assert self.cache is not None
        rows = torch.arange(len(self._blocks), device=self._blocks.device)
        num_slots = self._blocks.shape[1] * self.cache.block_size
        return [Decode(rows, self._blocks.flatten(), self._lengths, num_slots)]

    def decode_table(self) -> None:
        """Return None, because the lengths are not known on the host."""

    @property
    def gathers(self) -> bool:
        """True if a layer has gathered the slots of all KV blocks, because fused attention does not support it."""
        return "decodes" in vars(self)


def top_position(positions: NDArray[np.int64]) -> int | None:
    """Return the largest position of a flat batch, from positions int64 [axes, T].

    Return None if a row does not have the same position on all axes.
    """
    first = positions[0]
    return int(first.max()) if len(positions) == 1 or (positions[1:] == first).all() else None


def _slots(chunks: Sequence[Chunk], block_size: int) -> NDArray[np.int64]:
    slots: list[NDArray[np.int64] | list[int]] = []
    for chunk in chunks:
        first, within = divmod(chunk.start, block_size)
        if chunk.stop - chunk.start == 1:  # fast path, taken in every decode step for every sequence
            slots.append([chunk.blocks[first] * block_size + within])
        else:
            own = np.asarray(chunk.blocks[first : -(-chunk.stop // block_size)], np.int64)
            places = np.add.outer(own * block_size, np.arange(block_size)).ravel()
            slots.append(places[within : within + chunk.stop - chunk.start])
    return np.concatenate(slots)


def _parts(chunk: Chunk, size: int, num_blocks: int) -> Iterator[Chunk]:
    """Yield the parts of a chunk in consecutive sequences of `size` tokens, which have `num_blocks` KV blocks each."""
    for number in range(chunk.start // size, -(-chunk.stop // size)):
        first = number * size
        blocks = chunk.blocks[number * num_blocks : (number + 1) * num_blocks]
        yield Chunk(max(chunk.start - first, 0), min(chunk.stop - first, size), blocks)


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
    """Return the span ids of the chunk's context and rows.

    Return None if all rows are causal, for example in decode steps.
    """
    if chunk.span_ids is None or not _is_in_span(chunk):
        return None
    missing = max(0, chunk.stop - len(chunk.span_ids))  # output tokens of a preempted sequence that is recomputed
    return upload(torch.nn.functional.pad(chunk.span_ids[: chunk.stop], (0, missing), value=-1), device)


def _decode_group(group: Sequence[tuple[int, Chunk]], cache: PagedCache, uploads: Uploads) -> Callable[[], Decode]:
    table = block_table([chunk.blocks for _, chunk in group], cache.padding)
    rows = uploads.add(np.array([row for row, _ in group], np.int64))
    blocks = uploads.add(table.ravel())
    lengths = uploads.add(np.array([chunk.stop for _, chunk in group], np.int64))
    return lambda: Decode(rows(), blocks(), lengths(), table.shape[1] * cache.block_size)
