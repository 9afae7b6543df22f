"""Forward pass of the attention for training, npu_fusion_attention and its version 3, which torch_npu's SDPA calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators.attention import Sparse, attend
from tests.ascend.operators.layouts import join, split

_STATISTICS = 8
"""Number of copies of each row's statistics. In float32, the copies fill a block of the vector unit."""


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    softmax_layout: str = "",
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return attention_out, softmax_max and softmax_sum, an empty softmax_out, the seed, the offset and numels.

    softmax_max and softmax_sum are float32 [..., 8].
    """
    del inner_precise, unused
    if padding_mask is not None or prefix or keep_prob != 1 or sparse_mode > 4:
        raise NotImplementedError("padding_mask, prefix, dropout and sparse modes above 4 are not simulated")
    packed = input_layout == "TND"
    kv_heads = _kv_heads(query, key, head_num, input_layout)
    queries = split(query, input_layout, head_num, _stops(actual_seq_qlen) if packed else None)
    keys, values = (
        split(part, input_layout, kv_heads, _stops(actual_seq_kvlen) if packed else None) for part in (key, value)
    )
    # If there is no mask, the operator ignores the sparse mode and the window.
    sparse = Sparse(sparse_mode if atten_mask is not None else 0, atten_mask, pre_tockens, next_tockens)
    parts = []
    for i, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        shift = None if pse is None else pse[min(i, len(pse) - 1), :, : q.shape[1], : k.shape[1]]
        parts.append(attend(q, k, v, scale, sparse.seen(i, q.shape[1], k.shape[1]), shift))
    tokens = len(query) if packed else None
    out = join([part.out for part in parts], input_layout, tokens).to(query.dtype)
    statistics = []
    for rows in ([part.largest for part in parts], [part.total for part in parts]):
        wide = [row.unsqueeze(-1).expand(-1, -1, _STATISTICS) for row in rows]
        # A [T, N, 8] tensor has the memory order NTD, unless softmax_layout says otherwise.
        joined = join(wide, "TND" if softmax_layout == "TND" else "NTD", tokens) if packed else torch.stack(wide)
        statistics.append(joined.reshape(-1, head_num, _STATISTICS) if packed else joined)
    return out, *statistics, torch.empty(0, dtype=query.dtype), 0, 0, 0


def fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Compute the result of npu_fusion_attention, with lengths, the seed and the offset as tensors."""
    stops = [None if given is None else given.tolist() for given in (actual_seq_qlen, actual_seq_kvlen)]
    *found, seed, offset, _ = fusion_attention(
        query, key, value, head_num, input_layout, actual_seq_qlen=stops[0], actual_seq_kvlen=stops[1], **others
    )
    return *found, torch.tensor([seed]), torch.tensor([offset])


def _stops(given: Sequence[int] | None) -> list[int]:
    """Return the ends of the sequences, without the zeros that follow the last sequence."""
    stops = [int(stop) for stop in given or ()]
    while stops and not stops[-1]:
        stops.pop()
    return stops


def _kv_heads(query: Tensor, key: Tensor, heads: int, layout: str) -> int:
    if layout in {"BSH", "SBH"}:
        return key.shape[-1] * heads // query.shape[-1]
    return key.shape[1 if layout in {"TND", "BNSD"} else 2]
