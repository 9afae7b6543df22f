"""The attention of towers that take a step's pictures packed: npu_fusion_attention over all of them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.npu.npu_kernels import HALF, PACKED, works

NAME = "mindie_mm_flash_packed"
"""Under which transformers knows `attend`; by "flash" in it, towers do not take their pictures apart before."""

MOST_SEQUENCES = 1024
"""Sequences of one call (docs/npu.md): of a large picture windows are more, of a long video thrice as many."""


def pack(module: nn.Module) -> None:
    """Has the towers of `module` attend to all of a step's pictures at once, where they take them packed."""
    from transformers import AttentionInterface, AttentionMaskInterface  # late: not every process has a model
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        width = getattr(part, "head_dim", None)
        if config is None or width is None or "cu_seqlens" not in signature(type(part).forward).parameters:
            continue
        weight = next(part.parameters())
        if weight.device.type == "npu" and weight.dtype in HALF and works(PACKED, weight.device, weight.dtype, width):
            config._attn_implementation = NAME  # noqa: SLF001 - of one tower, not of the whole model


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
    """Attention of each sequence to itself, both ways; transformers' AttentionInterface gives the signature.

    [1, heads, T, width] each -> [1, T, heads, width]. `cu_seq_lens_q` [sequences + 1], on the host: where they begin
    and end.
    """
    assert attention_mask is None
    bounds = cu_seq_lens_q.tolist()
    packed = [part[0].transpose(0, 1) for part in (query, key, value)]
    outs = []
    for first in range(0, len(bounds) - 1, MOST_SEQUENCES):
        start, *stops = bounds[first : first + MOST_SEQUENCES + 1]
        rows = [part[start : stops[-1]] for part in packed]
        ends = [stop - start for stop in stops]
        outs.append(
            torch.ops.npu.npu_fusion_attention(
                *rows, query.shape[1], "TND", scale=scaling, actual_seq_qlen=ends, actual_seq_kvlen=ends
            )[0]
        )
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0), None
