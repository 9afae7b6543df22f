"""Attention of a flat batch over a paged KV cache, for transformers' attention layers.

The `forward` methods of the decoder pass the keyword argument `paged`, a `PagedBatch`, through to `attend`.
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
"""Name under which `attend` is registered with transformers. Only the text config uses it, because towers keep sdpa."""
CHUNKED = "chunked_attention"
"""Type of layers, in `layer_types` of a configuration, that compute attention within chunks (`KVLayer.chunk_size`)."""


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
    only_local_spans: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of each row to its own sequence, with the signature of transformers' AttentionInterface.

    A token of a layer whose type is `CHUNKED` attends only to the tokens of its own chunk.

    Args:
        module: The attention layer.
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, head_dim].
        attention_mask: Ignored, because `paged` determines the mask.
        scaling: Factor for the attention scores.
        paged: The tokens that each row attends to, and the KV cache.
        sliding_window: Maximum number of tokens that a token attends to, counted backwards from the token itself.
            Attention to later tokens of the same bidirectional span is not limited. None means no limit.
        s_aux: Attention sinks. They must be None, because no kernel here supports them.
        softcap: Cap of the scores. It must be None, because no kernel here supports it.
        only_local_spans: Whether attention within spans is bidirectional only in layers with a sliding window.

    Returns:
        [1, T, heads, head_dim], and None for the attention weights.

    Raises:
        UnsupportedCheckpoint: The layer has attention sinks or capped scores.

    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if s_aux is not None or softcap is not None:
        raise UnsupportedCheckpoint(
            f"{type(module).__name__} has attention sinks or softcapped scores, which are not supported"
        )
    spans = sliding_window is not None or not only_local_spans
    parts = query[0], key[0], value[0]
    size = chunk_size_of(module)
    out = paged_attention(layer, *parts, paged, scaling, sliding_window, spans=spans, chunk_size=size)
    return out.unsqueeze(0), None


def chunk_size_of(module: torch.nn.Module) -> int | None:
    """Return the chunk size of an attention layer in tokens, or None if the layer has no chunks."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    return config.attention_chunk_size if types and types[module.layer_idx] == CHUNKED else None


def paged_attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paged: PagedBatch,
    scaling: float,
    sliding_window: int | None = None,
    *,
    spans: bool = True,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the attention of each row to its own sequence, and store the new keys and values in the cache.

    A layer in `PagedCache.shared` gets the new keys and values of an earlier layer, which has stored them.

    Args:
        layer: Index of the layer.
        query: [heads, T, head_dim], of the dtype of the cache or float32.
        key: [kv_heads, T, head_dim], of the dtype of the query.
        value: [kv_heads, T, value_head_dim], of the dtype of the query.
        paged: The tokens that each row attends to, and the KV cache.
        scaling: Factor for the attention scores.
        sliding_window: Has the same meaning as in `attend`.
        spans: Whether attention within bidirectional spans is bidirectional.
        chunk_size: Has the same meaning as in `KVLayer`.

    Returns:
        [T, heads, value_head_dim].

    """
    if chunk_size is not None:
        paged = paged.cut(chunk_size)
    cached = None
    if paged.cache is not None and paged.slots is not None:
        cached = paged.cache.keys[layer], paged.cache.values[layer]
        kernels = kernels_of(query.device)
        if layer not in paged.cache.shared:
            kernels.store(cached, paged.slots, key.transpose(0, 1), value.transpose(0, 1))
        if (
            kernels.has_attention
            and sliding_window is None
            and (paged.is_causal or not spans)
            and paged.has_rows
            and kernels.attends(query, *cached, paged.rows)
        ):
            return kernels.attend(query.to(cached[0].dtype), *cached, paged.rows, scaling).to(query.dtype)
    match paged.prefills, paged.decodes:  # a batch with a single part needs no output buffer
        case [prefill], []:
            return _prefill(query, key, value, cached, prefill, scaling, sliding_window, spans=spans)
        case [], [decode]:
            assert cached is not None
            return _decode(query, *cached, decode, scaling, sliding_window)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])  # (T, heads, value_head_dim)
    for prefill in paged.prefills:
        rows = prefill.rows
        own = query[:, rows], key[:, rows], value[:, rows]
        out[rows] = _prefill(*own, cached, prefill, scaling, sliding_window, spans=spans)
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
    *,
    spans: bool,
) -> Tensor:
    """Compute attention from query [heads, n, head_dim] to key and value [kv_heads, n, head_dim] and to earlier pages.

    Return [n, heads, value_head_dim].
    """
    if prefill.context:
        assert cached is not None
        length = prefill.context + query.shape[1]
        earlier = (pages[prefill.blocks].flatten(0, 1)[:length].transpose(0, 1) for pages in cached)
        key, value = (part.to(query.dtype) for part in earlier)
    mask, span_ids = None, prefill.span_ids if spans else None
    if prefill.context or sliding_window is not None or span_ids is not None:
        at = torch.arange(prefill.context, key.shape[1], device=query.device).unsqueeze(1)
        to = torch.arange(key.shape[1], device=query.device)
        mask = to <= at
        if span_ids is not None:
            own = span_ids[prefill.context :].unsqueeze(1)
            mask |= (own == span_ids) & (own >= 0)
        if sliding_window is not None:
            # As in transformers' Gemma 3, the window limits attention to earlier tokens of a span, not to later ones.
            mask &= to > at - sliding_window
    grouped = query.shape[0] != key.shape[0]
    if grouped and query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        # No GPU kernel supports grouped heads with a mask or in float32. The fallback would keep all scores in memory.
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
    """Compute attention from query [heads, S, head_dim] to the pages. Return [S, heads, value_head_dim]."""
    count, kv_heads, dtype = query.shape[1], keys.shape[2], query.dtype
    # Treat query heads that share a key-value head as several queries of one head, so that no keys are copied.
    query = query.to(keys.dtype).transpose(0, 1).reshape(count, kv_heads, -1, query.shape[-1])
    k, v = (
        pages.index_select(0, decode.blocks).view(count, -1, kv_heads, pages.shape[-1]).transpose(1, 2)
        for pages in (keys, values)
    )
    mask = decode.mask(sliding_window, query.dtype)
    if query.device.type != "cpu":
        # Not every kernel broadcasts a mask over queries (docs/npu.md). On the CPU the expanded mask would cost time.
        mask = mask.expand(-1, 1, query.shape[2], -1)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(count, -1, v.shape[-1]).to(dtype)
