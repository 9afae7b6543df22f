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

from mindie_mm.device import Rows, Uploads, block_table, kernels_of, upload, zeros


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of every layer, in KV blocks. A sequence may use any blocks in any order."""

    keys: tuple[Tensor, ...]
    """Keys of each layer, [blocks + 2, block_size, kv_heads, head_dim].

    The last two blocks belong to no sequence: `padding`, which stays zero, and `scratch`.
    """
    values: tuple[Tensor, ...]
    """Values of each layer, [blocks + 2, block_size, kv_heads, value_head_dim]."""
    block_size: int
    """Number of tokens in a block."""
    memory: tuple[Tensor, ...]
    """Tensors [layers, blocks + 2, ...] of all `keys` and `values`. Keys and values of the same width share one."""
    _blank: tuple[Tensor, ...]
    """A block of zeros for each tensor of `memory`, [layers, 1, ...]."""

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
        """Allocate a cache filled with zeros.

        Attention also reads the unused tail of a block, under a mask. The tail must therefore contain finite values.
        See `clear`.
        """
        shape = (num_blocks + 2, block_size, num_kv_heads)
        sizes = [(num_layers, head_dim), (num_layers, value_head_dim)]
        if head_dim == value_head_dim:
            sizes = [(2 * num_layers, head_dim)]
        memory = tuple(zeros((count, *shape, width), dtype, device) for count, width in sizes)
        blank = tuple(zeros((count, 1, *shape[1:], width), dtype, device) for count, width in sizes)
        layers = [layer for part in memory for layer in part.unbind()]
        return cls(tuple(layers[:num_layers]), tuple(layers[num_layers:]), block_size, memory, blank)

    def repeated(self, num_layers: int) -> PagedCache:
        """Return a cache in which `num_layers` layers share the memory of this cache's only layer."""
        return PagedCache(self.keys * num_layers, self.values * num_layers, self.block_size, self.memory, self._blank)

    @property
    def padding(self) -> int:
        """Index of the padding block, which no sequence uses."""
        return len(self.keys[0]) - 2

    @property
    def scratch(self) -> int:
        """Index of the block to which the surplus rows of a captured graph write, because every row writes."""
        return len(self.keys[0]) - 1

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks, int64 [n], that are about to be partly filled.

        An earlier sequence may have left NaN in the rest of a block. The mask gives these values the weight 0, but 0
        times NaN is NaN.
        """
        if not len(blocks):
            return
        for part, blank in zip(self.memory, self._blank, strict=True):  # all layers at once
            # Avoid index_fill_, which in CANN copies the whole tensor and writes the copy back.
            part.index_copy_(1, blocks, blank.expand(-1, len(blocks), *part.shape[2:]))


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
            uploads: Copies to the device, together with which the tensors of the batch are copied.

        """
        self.cache = cache
        self.top_position = top_position
        self.has_rows = True
        """Whether fused attention may read `rows`."""
        self._chunks = chunks
        self._device = device
        self._uploads = uploads or Uploads(device)
        self._slots = None if cache is None else self._uploads.add(_slots(chunks, cache.block_size))
        if cache is not None and device.type != "cpu" and kernels_of(device).has_attention:
            self.rows  # noqa: B018 - adds their tensors to the uploads
        self.is_causal = all(not _is_in_span(chunk) for chunk in chunks)
        """Whether no row attends to a later row."""

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
        self, cache: PagedCache, slots: Tensor, blocks: Tensor, lengths: Tensor, host_lengths: Sequence[int]
    ) -> None:
        """Describe a batch of S sequences.

        Args:
            cache: The KV cache.
            slots: Index of each new token in the flattened cache, int64 [S].
            blocks: Blocks of each sequence, int64 [S, n], padded with the cache's padding block.
            lengths: Number of tokens of each sequence, including the new token, int64 [S].
            host_lengths: The same numbers for fused attention that takes them from the host. Each launch of a captured
                graph replaces them.

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

    @cached_property
    def rows(self) -> Rows:
        return Rows.of_table(self._blocks, self._host_lengths)

    @cached_property
    def decodes(self) -> list[Decode]:
        assert self.cache is not None
        rows = torch.arange(len(self._blocks), device=self._blocks.device)
        num_slots = self._blocks.shape[1] * self.cache.block_size
        return [Decode(rows, self._blocks.flatten(), self._lengths, num_slots)]

    @property
    def gathers(self) -> bool:
        """Whether a layer has gathered the slots of all KV blocks, because fused attention does not support it."""
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
    """Return the span ids of the chunk's context and rows. None if all rows are causal, for example in decode steps."""
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
