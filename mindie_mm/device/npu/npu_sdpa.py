"""Check of torch's scaled_dot_product_attention on an NPU, which towers and unfused layers use.

torch_npu computes it with fused operators, which may give wrong results without an error. Matrix products and softmax
then replace it in the whole process. They need memory for all scores.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.npu.npu_kernels import HALF, SDPA, works


def check(module: nn.Module) -> None:
    """Replace torch_npu's kernel if its results are wrong for the heads of a layer of `module`."""
    for part in module.modules():
        width = getattr(part, "head_dim", None)
        weight = next(part.parameters(), None)
        if width is None or weight is None or weight.device.type != "npu" or weight.dtype not in HALF:
            continue
        if not works(SDPA, weight.device, weight.dtype, width):
            _replace()


@cache
def _replace() -> torch.library.Library:
    """Replace torch_npu's kernel as long as the returned library exists."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl("scaled_dot_product_attention", _attend, key, allow_override=True)
    return library


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(  # noqa: SLF001 - the only name of this kernel
        query, key, value, attn_mask, dropout_p, is_causal, **settings
    )[0]
    return out
