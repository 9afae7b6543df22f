"""Attention of a flat batch of sequences over a paged KV cache, plugged into transformers' own layers.

A flat batch lays the tokens of all its sequences in one row: transformers' decoder sees a batch of one, [1, T].
`PagedBatch` says which rows belong together and where their keys and values are kept. It reaches `attend` as the
keyword argument `paged`, through the decoder's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mindie_mm.device import Rows, kernels_of, upload, zeros

NAME = "mindie_mm_paged"
"""The name under which transformers knows `attend`; give it to the text config alone, the towers keep sdpa."""


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
                pages.index_fill_(0, which, 0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a flat batch."""

    start: int
    """Position of the first token in its sequence: as many tokens are in the cache already."""
    stop: int
    """Position behind the last one."""
    blocks: Sequence[int]
    """Blocks of the sequence, enough for `stop` tokens; empty where no cache is kept."""
    groups: Tensor | None = None
    """int64 [n], n >= stop: tokens of the sequence that attend to each other both ways have one number, -1 none.

    A chunk holds a group's first token and its last, or neither.
    """


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Rows of a chunk of several tokens."""

    rows: slice
    context: int
    """Tokens before the chunk, to be read from the pages."""
    blocks: Tensor | None
    """int64 [blocks] of the sequence; None without a context."""
    groups: Tensor | None
    """int64 [context + rows]: as Chunk's; None where the rows have none."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of sequences with one new token each and contexts of similar length, attended to in one call."""

    rows: Tensor
    """int64 [S]."""
    blocks: Tensor
    """int64 [S * blocks], padded with the cache's block for that."""
    lengths: Tensor
    """int64 [S, 1, 1, 1]: tokens of each, the new one counted."""


class PagedBatch:
    """Which rows of a flat batch attend to what. Built once a step, read by every layer."""

    def __init__(self, chunks: Sequence[Chunk], cache: PagedCache | None, device: torch.device) -> None:
        """The batch of `chunks`, whose tokens lie one behind another in the flat row.

        `cache` None: nothing is kept, every chunk is a whole sequence.
        """
        self.cache = cache
        self._chunks = chunks
        self._device = device
        self.slots = None if cache is None else upload(_slots(chunks, cache.block_size), device)
        """int64 [T]: the token's place in the flattened cache."""
        self.is_causal = all(not _has_groups(chunk) for chunk in chunks)
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
    def prefills(self) -> list[_Prefill]:
        """The chunks that are attended to one by one."""
        return [_prefill_of(chunk, row, self._device) for chunk, row in self._placed() if not self._is_decode(chunk)]

    @cached_property
    def decodes(self) -> list[_Decode]:
        """Those of one new token each, together where their contexts are of similar length."""
        groups: dict[int, list[tuple[int, Chunk]]] = {}
        for chunk, row in self._placed():
            if self._is_decode(chunk):
                # Powers of two bound what padding to the longest of a group costs to a factor of two.
                groups.setdefault(len(chunk.blocks).bit_length(), []).append((row, chunk))
        if self.cache is None:
            return []
        return [_decode_group(group, self.cache.padding, self._device) for group in groups.values()]

    def _placed(self) -> Iterator[tuple[Chunk, int]]:
        """Each chunk with its first row."""
        row = 0
        for chunk in self._chunks:
            yield chunk, row
            row += chunk.stop - chunk.start

    def _is_decode(self, chunk: Chunk) -> bool:
        return self.cache is not None and chunk.stop - chunk.start == 1 and chunk.start > 0


def _slots(chunks: Sequence[Chunk], block_size: int) -> NDArray[np.int64]:
    slots: list[NDArray[np.int64]] = []
    for chunk in chunks:
        block, within = np.divmod(np.arange(chunk.start, chunk.stop), block_size)
        slots.append(np.asarray(chunk.blocks, np.int64)[block] * block_size + within)
    return np.concatenate(slots)


def _has_groups(chunk: Chunk) -> bool:
    return chunk.groups is not None and bool((chunk.groups[chunk.start : chunk.stop] >= 0).any())


def _prefill_of(chunk: Chunk, row: int, device: torch.device) -> _Prefill:
    return _Prefill(
        slice(row, row + chunk.stop - chunk.start),
        chunk.start,
        upload(torch.tensor(chunk.blocks), device) if chunk.start else None,
        _groups(chunk, device),
    )


def _groups(chunk: Chunk, device: torch.device) -> Tensor | None:
    """Numbers of the chunk's context and rows; None for rows that attend causally alone, as decodes do."""
    if chunk.groups is None or not _has_groups(chunk):
        return None
    missing = max(0, chunk.stop - len(chunk.groups))  # output tokens, where a preempted sequence comes again
    return upload(torch.nn.functional.pad(chunk.groups[: chunk.stop], (0, missing), value=-1), device)


def _decode_group(group: Sequence[tuple[int, Chunk]], padding: int, device: torch.device) -> _Decode:
    width = max(len(chunk.blocks) for _, chunk in group)
    tables = [[*chunk.blocks, *[padding] * (width - len(chunk.blocks))] for _, chunk in group]
    return _Decode(
        upload([row for row, _ in group], device),
        upload(tables, device).flatten(),
        upload([chunk.stop for _, chunk in group], device).view(-1, 1, 1, 1),
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row to its own sequence; transformers' AttentionInterface gives the signature.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim]; returns [1, T, heads, head_dim].
    `sliding_window` limits a token to itself, that many - 1 before it, and those of its group behind it.
    """
    del attention_mask  # causality is in `paged`
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged_attention(layer, query[0], key[0], value[0], paged, scaling, sliding_window).unsqueeze(0), None


def paged_attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paged: PagedBatch,
    scaling: float,
    sliding_window: int | None = None,
) -> Tensor:
    """The same for one layer of a decoder without a batch axis, the layer's number given.

    query [heads, T, head_dim], key [kv_heads, T, head_dim], value [kv_heads, T, value_head_dim]; returns
    [T, heads, value_head_dim].
    """
    cached = None
    if paged.cache is not None and paged.slots is not None:
        cached = paged.cache.keys[layer], paged.cache.values[layer]
        kernels = kernels_of(query.device)
        for pages, new in zip(cached, (key, value), strict=True):
            kernels.store(pages, paged.slots, new.transpose(0, 1))
        if sliding_window is None and paged.is_causal and kernels.attends(query, *cached):
            return kernels.attend(query, *cached, paged.rows, scaling)
    if len(paged.prefills) == 1 and not paged.decodes:  # the rows are one sequence's: nothing to put together
        return _prefill(query, key, value, cached, paged.prefills[0], scaling, sliding_window)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])  # (T, heads, value_head_dim)
    for prefill in paged.prefills:
        rows = prefill.rows
        own = query[:, rows], key[:, rows], value[:, rows]
        out[rows] = _prefill(*own, cached, prefill, scaling, sliding_window)
    for decode in paged.decodes:
        assert cached is not None
        out[decode.rows] = _decode(query[:, decode.rows], *cached, decode, scaling, sliding_window)
    return out


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: tuple[Tensor, Tensor] | None,
    prefill: _Prefill,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """query (heads, n, head_dim) over key and value (kv_heads, n, head_dim) and the pages; (n, heads, head_dim)."""
    if prefill.context:
        assert cached is not None
        length = prefill.context + query.shape[1]
        key, value = (pages[prefill.blocks].flatten(0, 1)[:length].transpose(0, 1) for pages in cached)
    mask, groups = None, prefill.groups
    if prefill.context or sliding_window is not None or groups is not None:
        at = torch.arange(prefill.context, key.shape[1], device=query.device).unsqueeze(1)
        to = torch.arange(key.shape[1], device=query.device)
        mask = to <= at
        if groups is not None:
            own = groups[prefill.context :].unsqueeze(1)
            mask |= (own == groups) & (own >= 0)
        if sliding_window is not None:
            # A group longer than the window is cut by it, on the side of the past alone, as in transformers' Gemma 3.
            mask &= to > at - sliding_window
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0].transpose(0, 1)


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, decode: _Decode, scaling: float, sliding_window: int | None
) -> Tensor:
    """query (heads, S, head_dim) over the pages keys and values; returns (S, heads, head_dim)."""
    count, kv_heads = query.shape[1], keys.shape[2]
    # The heads that share a key-value head go in as its queries: no key is copied for a head.
    query = query.transpose(0, 1).reshape(count, kv_heads, -1, query.shape[-1])
    k, v = (
        pages.index_select(0, decode.blocks).view(count, -1, kv_heads, pages.shape[-1]).transpose(1, 2)
        for pages in (keys, values)
    )
    to = torch.arange(k.shape[2], device=query.device)
    mask = to < decode.lengths
    if sliding_window is not None:
        mask &= to >= decode.lengths - sliding_window
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(count, -1, v.shape[-1])
