"""The attention of towers in bfloat16, a few queries at a time by plain products.

torch's own multiplies bfloat16 on the CPU as slowly as float32, unless the processor has AMX; a product of matrices
takes the processor's instructions for bfloat16 (docs/decisions/0020-cpu-speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.cpu.packed_linear import multiplies_bfloat16

NAME = "mindie_mm_blocks"
"""Under which transformers knows `attend`."""

_QUERIES = 128
"""Their scores stay in the processor's cache: 1.2 MiB where there are 5,000 keys."""


def pays() -> bool:
    """Whether this processor gains by it."""
    return multiplies_bfloat16() and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001


def replace(module: nn.Module) -> None:
    """Has the towers of `module` that are in bfloat16 attend by `attend`, where the processor gains by it."""
    from transformers import AttentionInterface, AttentionMaskInterface  # late: not every process has a model
    from transformers.masking_utils import sdpa_mask

    if not pays():
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        # A setting of the whole model's would be that of its parts.
        if getattr(config, "_attn_implementation", None) != "sdpa" or config.sub_configs:
            continue
        weight = next(part.parameters(), None)
        if weight is not None and weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            config._attn_implementation = NAME  # noqa: SLF001 - of one tower, not of the whole model


def attend(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What `sdpa` of transformers does; [batch, heads, n, width] each -> [batch, n, heads, width].

    Scores are rounded to bfloat16, as they are where transformers attends in plain operators ("eager").
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_causal = kwargs.get("is_causal")
    is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    fits = query.dtype == torch.bfloat16 and query.shape[2] > _QUERIES and query.shape[1] == key.shape[1]
    if not fits or is_causal or attention_mask is not None or kwargs.get("position_bias") is not None:
        own: tuple[Tensor, None] = sdpa_attention_forward(layer, query, key, value, attention_mask, **kwargs)
        return own
    scaling = kwargs.get("scaling")
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    keys, value = key.contiguous().transpose(2, 3), value.contiguous()
    for queries, place in zip(query.split(_QUERIES, 2), out.split(_QUERIES, 1), strict=True):
        place.copy_((queries @ keys).softmax(-1).matmul(value).transpose(1, 2))
    return out, None
