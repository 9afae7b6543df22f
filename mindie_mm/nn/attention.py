"""Attention of a flat batch over a paged KV cache, plugged into transformers' own layers.

What attends to what, `PagedBatch`, reaches `attend` as the keyword argument `paged`, through the decoder's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mindie_mm.device import kernels_of
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.paged_batch import Decode, PagedBatch, Prefill

NAME = "mindie_mm_paged"
"""The name under which transformers knows `attend`; give it to the text config alone, the towers keep sdpa."""


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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row to its own sequence; transformers' AttentionInterface gives the signature.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim]; returns [1, T, heads, head_dim].
    Causality is in `paged`, so `attention_mask` is not looked at. `sliding_window` limits a token to itself, that many
    - 1 before it, and those of its bidirectional span behind it. UnsupportedCheckpoint for layers with sinks (`s_aux`)
    or with caps of their scores (`softcap`): no kernel here has them.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if s_aux is not None or softcap is not None:
        raise UnsupportedCheckpoint(
            f"{type(module).__name__} has attention sinks or capped scores, which is not served"
        )
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
        if (
            sliding_window is None
            and paged.is_causal
            and kernels.attends(query, *cached, paged.num_sequences, paged.longest)
        ):
            return kernels.attend(query, *cached, paged.rows, scaling)
    match paged.prefills, paged.decodes:  # nothing to put together
        case [prefill], []:
            return _prefill(query, key, value, cached, prefill, scaling, sliding_window)
        case [], [decode]:
            assert cached is not None
            return _decode(query, *cached, decode, scaling, sliding_window)
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
    prefill: Prefill,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """query (heads, n, head_dim) over key and value (kv_heads, n, head_dim) and the pages; (n, heads, head_dim)."""
    if prefill.context:
        assert cached is not None
        length = prefill.context + query.shape[1]
        key, value = (pages[prefill.blocks].flatten(0, 1)[:length].transpose(0, 1) for pages in cached)
    mask, span_ids = None, prefill.span_ids
    if prefill.context or sliding_window is not None or span_ids is not None:
        at = torch.arange(prefill.context, key.shape[1], device=query.device).unsqueeze(1)
        to = torch.arange(key.shape[1], device=query.device)
        mask = to <= at
        if span_ids is not None:
            own = span_ids[prefill.context :].unsqueeze(1)
            mask |= (own == span_ids) & (own >= 0)
        if sliding_window is not None:
            # A span longer than the window is cut by it, on the side of the past alone, as in transformers' Gemma 3.
            mask &= to > at - sliding_window
    grouped = query.shape[0] != key.shape[0]
    if grouped and query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        # No kernel of a GPU takes a mask, or float32, and grouped heads: all scores would be in memory at once.
        key, value = (part.repeat_interleave(query.shape[0] // part.shape[0], dim=0) for part in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=grouped,
    )[0].transpose(0, 1)


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, decode: Decode, scaling: float, sliding_window: int | None
) -> Tensor:
    """query (heads, S, head_dim) over the pages keys and values; returns (S, heads, head_dim)."""
    count, kv_heads = query.shape[1], keys.shape[2]
    # The heads that share a key-value head go in as its queries: no key is copied for a head.
    query = query.transpose(0, 1).reshape(count, kv_heads, -1, query.shape[-1])
    k, v = (
        pages.index_select(0, decode.blocks).view(count, -1, kv_heads, pages.shape[-1]).transpose(1, 2)
        for pages in (keys, values)
    )
    mask = decode.mask(sliding_window, query.dtype)
    if query.device.type != "cpu":
        # Not every kernel takes a mask with one row for several queries (docs/npu.md); on the host it costs time.
        mask = mask.expand(-1, 1, query.shape[2], -1)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(count, -1, v.shape[-1])
