"""Operators of 8-bit integers. Sums of integers are exact, and numbers are rounded half to even."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES: dict[Any, torch.dtype] = {1: torch.int8, 5: torch.float16, 15: torch.bfloat16}
"""Dtypes by their numbers in torch's ScalarType, which the schemas use."""


def quantize(
    input: Tensor,  # noqa: A002 - the schema's name
    scales: Tensor,
    zero_points: Tensor | None,
    div_mode: bool = True,
    **unused: Any,
) -> Tensor:
    """Return `input / scales + zero_points`, or with div_mode False `input * scales + zero_points`, as int8."""
    values = input.float() / scales.float() if div_mode else input.float() * scales.float()
    if zero_points is not None:
        values = values + zero_points.float()
    return values.round().clamp(-128, 127).to(torch.int8)


def dynamic_quant(input: Tensor, **unused: Any) -> tuple[Tensor, Tensor]:  # noqa: A002 - the schema's name
    """Return each row divided by its scale, as int8, and the scales: the largest absolute values divided by 127."""
    values = input.float()
    scales = values.abs().amax(-1) / 127
    rounded = (values / scales.unsqueeze(-1)).nan_to_num(0.0).round()
    return rounded.clamp(-128, 127).to(torch.int8), scales


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    **unused: Any,
) -> Tensor:
    """Return `(x1 @ x2 + integer bias) * scale * pertoken_scale + float bias`."""
    sums = x1.double() @ x2.double()  # exact
    if bias is not None and bias.dtype == torch.int32:
        sums, bias = sums + bias, None
    numbers = scale.to(torch.uint32).view(torch.float32) if scale.dtype == torch.int64 else scale
    out = sums.float() * numbers.float()
    if pertoken_scale is not None:
        out = out * pertoken_scale.float().unsqueeze(-1)
    if bias is not None:
        out = out + bias.float()
    dtype = DTYPES[output_dtype] if isinstance(output_dtype, int) else output_dtype
    return out.round().clamp(-128, 127).to(torch.int8) if dtype in (None, torch.int8) else out.to(dtype)
