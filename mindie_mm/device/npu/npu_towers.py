"""Fused attention for towers that process the images of a step as one packed sequence."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.npu.npu_kernels import HALF, works
from mindie_mm.device.npu.packed_attention import OPERATORS, PackedAttention

NAME = "mindie_mm_flash_packed"
"""Name under which `attend` is registered with transformers.

Because the name contains "flash", towers pass all images as one packed sequence instead of splitting them.
"""

MOST_SEQUENCES = 1024
"""Maximum number of sequences in one call (docs/npu.md).

A large image or a long video may have more windows. They are then divided among several calls.
"""


def pack(module: nn.Module) -> None:
    """Make towers of `module` that support packed images compute the attention of all images of a step together."""
    from transformers import AttentionInterface, AttentionMaskInterface  # imported late: not every process has a model
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        width = getattr(part, "head_dim", None)
        if config is None or width is None or "cu_seqlens" not in signature(type(part).forward).parameters:
            continue
        weight, heads = next(part.parameters()), getattr(part, "num_heads", 2)
        if weight.device.type == "npu" and weight.dtype in HALF and chosen(weight.device, weight.dtype, heads, width):
            config._attn_implementation = NAME  # noqa: SLF001 - set for one tower, not for the whole model


def chosen(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> PackedAttention | None:
    """Return the first operator that gives correct results, or None."""
    return next((attend for name, attend in OPERATORS.items() if works(name, device, dtype, heads, width)), None)


def attend(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **__: Any,
) -> tuple[Tensor, None]:
    """Compute bidirectional attention within each sequence, with the signature of transformers' AttentionInterface.

    Args:
        query: [1, heads, T, width].
        key: [1, heads, T, width].
        value: [1, heads, T, width].
        attention_mask: Must be None.
        scaling: Factor for the attention scores.
        cu_seq_lens_q: Bounds of the sequences, [sequences + 1], on the host.

    Returns:
        [1, T, heads, width], and None for the attention weights.

    """
    assert attention_mask is None
    bounds = cu_seq_lens_q.tolist()
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    within = chosen(q.device, q.dtype, *q.shape[1:])
    assert within is not None, "pack has found an operator"
    outs = []
    for first in range(0, len(bounds) - 1, MOST_SEQUENCES):
        start, *stops = bounds[first : first + MOST_SEQUENCES + 1]
        rows = slice(start, stops[-1])
        outs.append(within(q[rows], k[rows], v[rows], [stop - start for stop in stops], scaling))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0), None
