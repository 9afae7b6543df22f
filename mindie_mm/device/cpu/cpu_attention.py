"""Attention of towers in bfloat16, computed with plain matrix products for one block of queries at a time.

On a CPU without AMX, PyTorch's attention is as slow in bfloat16 as in float32. Matrix products use the processor's
bfloat16 instructions (docs/decisions/0020-cpu-speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.choices import choose
from mindie_mm.device.cpu import wide_linear
from mindie_mm.device.cpu.onednn_linear import multiplies_bfloat16

NAME = "mindie_mm_blocks"
"""Name under which `attend` is registered with transformers."""

_QUERIES = 128
"""Number of queries in a block.

The scores of a block fit into the processor's cache. With 5,000 keys, they take 1.2 MiB.
"""


def pays() -> bool:
    """Return whether `attend` is faster on this processor than PyTorch's attention."""
    is_slow = torch.cpu._is_amx_tile_supported() or wide_linear.pays()  # noqa: SLF001 - there is no public name
    return multiplies_bfloat16() and not is_slow


def replace(module: nn.Module) -> None:
    """Make the bfloat16 towers of `module` use `attend` if it is faster on this processor."""
    from transformers import AttentionInterface, AttentionMaskInterface  # imported late: not every process has a model
    from transformers.masking_utils import sdpa_mask

    if not choose("blocks", pays):
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        # A setting of the whole model would also apply to its parts, so only configs without sub-configs are changed.
        if getattr(config, "_attn_implementation", None) != "sdpa" or config.sub_configs:
            continue
        weight = next(part.parameters(), None)
        if weight is not None and weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            config._attn_implementation = NAME  # noqa: SLF001 - set for one tower, not for the whole model


def attend(
    layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention like transformers' "sdpa", from [batch, heads, n, width] to [batch, n, heads, width].

    Scores are rounded to bfloat16, as in transformers' "eager" attention.
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
