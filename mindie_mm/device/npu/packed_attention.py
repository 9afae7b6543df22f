"""Operators for bidirectional attention within each of several packed sequences, as in towers.

Each function has the same arguments and result:

    query, key, value: [T, heads, width].
    stops: Index after the last row of each sequence.
    scaling: Factor for the attention scores.

The result is [T, heads, width].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

PackedAttention = Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor]

_WIDTHS = (64, 128, 192)
"""Head widths for which CANN's inference operators are documented, or used elsewhere, with packed sequences."""


def infer(query: Tensor, key: Tensor, value: Tensor, stops: Sequence[int], scaling: float) -> Tensor:
    """Attend with the operator that CANN documents for inference."""
    heads, width = query.shape[1:]
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        *(_widened(part) for part in (query, key, value)),
        num_heads=heads,
        num_key_value_heads=heads,
        input_layout="TND",
        scale=scaling,
        actual_seq_lengths=stops,
        actual_seq_lengths_kv=stops,
    )[0]
    return out[..., :width]


def unpad(query: Tensor, key: Tensor, value: Tensor, stops: Sequence[int], scaling: float) -> Tensor:
    """Attend with the operator of ATB, which is part of the package NNAL."""
    heads, width = query.shape[1:]
    wide = [_widened(part) for part in (query, key, value)]
    lengths = torch.tensor([stop - start for start, stop in pairwise([0, *stops])], dtype=torch.int32)
    out = torch.empty_like(wide[0])
    torch.ops.atb._npu_flash_attention_unpad(*wide, lengths, scaling, heads, heads, out)  # noqa: SLF001 - its only name
    return out[..., :width]


def train(query: Tensor, key: Tensor, value: Tensor, stops: Sequence[int], scaling: float) -> Tensor:
    """Attend with the operator that CANN documents for training, which inference cards may lack."""
    out: Tensor = torch.ops.npu.npu_fusion_attention(
        query, key, value, query.shape[1], "TND", scale=scaling, actual_seq_qlen=stops, actual_seq_kvlen=stops
    )[0]
    return out


def _widened(part: Tensor) -> Tensor:
    """Append zeros to each head, which do not change scores, up to the next supported width."""
    width = part.shape[-1]
    return pad(part, (0, next((one for one in _WIDTHS if one >= width), width) - width)).contiguous()


OPERATORS: Mapping[str, PackedAttention] = {
    "npu_fused_infer_attention_score (TND, no mask)": infer,
    "_npu_flash_attention_unpad": unpad,
    "npu_fusion_attention": train,
}
"""The operators in the order in which they are tried."""
