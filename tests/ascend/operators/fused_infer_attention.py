"""Attention for inference: npu_fused_infer_attention_score and its version 2, and two older operators.

The older operators are npu_prompt_flash_attention and npu_incre_flash_attention. ATB has _npu_flash_attention_unpad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators.attention import Attended, Sparse, attend
from tests.ascend.operators.layouts import join, pages_of, split


def _spread(given: Sequence[int] | None, count: int, default: int) -> list[int]:
    """Return the length of each sequence. `given` has one length per sequence or one for all sequences, or is None."""
    if given is None:
        return [default] * count
    return [int(given[0])] * count if len(given) == 1 else [int(length) for length in given[:count]]


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention_out and softmax_lse.

    attention_out has the shape of the query, with the width of the value. softmax_lse is float32. If it is not
    requested, it is a zero of shape [1].
    """
    _refuse_unused(unused)
    kv_heads = num_key_value_heads or num_heads
    layout, _, out_layout = input_layout.partition("_")
    packed = layout in {"TND", "NTD"}
    if query_rope is not None:  # in MLA, the rotated part of the keys is appended to their last axis
        assert key_rope is not None
        query = _widened(query, query_rope, layout, num_heads)
        key = _widened(key, key_rope, "pages" if block_table is not None else layout, kv_heads)
    stops = [int(stop) for stop in actual_seq_lengths] if packed and actual_seq_lengths else None
    queries = split(query, layout, num_heads, stops)
    if block_table is not None:
        assert actual_seq_lengths_kv is not None
        kv_lengths = _spread(actual_seq_lengths_kv, len(queries), 0)
        keys, values = (
            [
                pages_of(pages, row, length, kv_heads, block_size)
                for row, length in zip(block_table, kv_lengths, strict=False)
            ]
            for pages in (key, value)
        )
    else:
        kv_stops = [int(stop) for stop in actual_seq_lengths_kv] if packed and actual_seq_lengths_kv else None
        keys, values = (split(part, layout, kv_heads, kv_stops) for part in (key, value))
        if not packed:
            kv_lengths = _spread(actual_seq_lengths_kv, len(queries), keys[0].shape[1])
            keys, values = (
                [part[:, :n] for part, n in zip(parts, kv_lengths, strict=True)] for parts in (keys, values)
            )
    # One query per sequence selects incremental inference, which ignores the sparse mode and the window.
    single = not packed and queries[0].shape[1] == 1 and query_rope is None
    mask = atten_mask
    if single and mask is not None and mask.dim() == 2:  # [B, KV_S]
        mask = mask[:, None, None]
    sparse = Sparse(
        0 if single else sparse_mode, mask, 2**31 - 1 if single else pre_tokens, 2**31 - 1 if single else next_tokens
    )
    lengths = [part.shape[1] for part in queries]
    if not packed and not single:
        lengths = _spread(actual_seq_lengths, len(queries), queries[0].shape[1])
    parts = [
        _one(i, part[:, :length], keys[i], values[i], scale, sparse, pse_shift, rows=part.shape[1])
        for i, (part, length) in enumerate(zip(queries, lengths, strict=True))
    ]
    tokens = query.shape[0 if layout == "TND" else 1] if packed else None
    out = join([part.out for part in parts], out_layout or layout, tokens).to(query.dtype)
    if not softmax_lse_flag:
        return out, torch.zeros(1)
    lse = [part.lse.unsqueeze(-1) for part in parts]
    return out, join(lse, "TND", tokens) if packed else torch.stack(lse)


def _one(
    item: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sparse: Sparse,
    shift: Tensor | None,
    *,
    rows: int,
) -> Attended:
    count, keys = query.shape[1], key.shape[1]
    if shift is not None:
        shift = shift[min(item, len(shift) - 1), :, :count, :keys]
    if not keys:
        shape = query.shape[:2]
        return Attended(torch.zeros(*shape, value.shape[-1]), torch.full(shape, -torch.inf), torch.zeros(shape))
    found = attend(query, key, value, scale, sparse.seen(item, count, keys), shift)
    if rows == count:
        return found
    # The operator does not compute rows beyond the end of a sequence.
    pad = rows - count
    out = torch.nn.functional.pad(found.out, (0, 0, 0, pad), value=torch.nan)
    largest, total = (torch.nn.functional.pad(part, (0, pad), value=torch.nan) for part in (found.largest, found.total))
    return Attended(out, largest, total)


def _widened(part: Tensor, rope: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BSH" or (layout == "pages" and part.dim() == 3):
        both = [each.unflatten(-1, (heads, -1)) for each in (part, rope)]
        return torch.cat(both, dim=-1).flatten(-2)
    return torch.cat([part, rope], dim=-1)


def _refuse_unused(named: dict[str, Any]) -> None:
    """Refuse quantization, shared prefixes and left padding, because ignoring them would give wrong results."""
    for name, value in named.items():
        if isinstance(value, Tensor) or (isinstance(value, list | tuple) and value):
            raise NotImplementedError(f"{name} is given, which the simulated operator has not")


def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the result with the first version of the operator, whose arguments have different names."""
    return fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        num_heads=num_query_heads,
        scale=softmax_scale,
        softmax_lse_flag=return_softmax_lse,
        **others,
    )


def fused_infer_attention_score_out(
    query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor], workspace: Tensor | None = None, **others: Any
) -> tuple[Tensor, ...]:
    """Write the results to `out`. The operator in a graph needs this overload."""
    assert workspace is not None
    for target, result in zip(out, fused_infer_attention_score(query, key, value, **others), strict=True):
        target.copy_(result)
    return (*out,)


def max_workspace(query: Tensor, *_: Tensor, **__: Any) -> Tensor:
    return query.new_empty(1024, dtype=torch.uint8)


def infer_output(query: Tensor, value: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the results. The width of values on pages is not needed if it is that of the query."""
    if others.get("softmax_lse_flag") or others.get("query_rope") is not None:
        raise NotImplementedError("only the attention itself is computed in a graph")
    return torch.empty_like(query), query.new_empty(1, dtype=torch.float32)


def prompt_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale_value: float = 1.0, **others: Any
) -> Tensor:
    others.setdefault("next_tokens", 0)
    return fused_infer_attention_score(query, key, value, scale=scale_value, **others)[0]


def incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths: Sequence[int] | None = None,
    scale_value: float = 1.0,
    **others: Any,
) -> Tensor:
    """Attend with one query per sequence. `actual_seq_lengths` contains the number of keys of each sequence."""
    return fused_infer_attention_score(
        query, key, value, actual_seq_lengths_kv=actual_seq_lengths, scale=scale_value, **others
    )[0]


def flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """Attend within each sequence of [T, heads, width], without a mask. `seq_len` contains the lengths, on the host."""
    stops = seq_len.cumsum(0).tolist()
    settings = {"num_heads": num_heads, "num_key_value_heads": num_kv_heads, "input_layout": "TND"}
    ends = {"actual_seq_lengths": stops, "actual_seq_lengths_kv": stops}
    out.copy_(fused_infer_attention_score(query, key, value, scale=scale_value, **settings, **ends)[0])
