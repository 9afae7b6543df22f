"""Products of rows with 8-bit weights, by fused operators of torch_npu. The rows are rounded to 8 bits.

Sources: torch_npu's documentation of npu_dynamic_quant, npu_quantize and npu_quant_matmul (Atlas A2 and A3), and the
calls in vllm-ascend (quantization/methods) and MindIE-LLM (w8a8.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

DYNAMIC, STATIC = "npu_quant_matmul (npu_dynamic_quant)", "npu_quant_matmul (npu_quantize)"
MOST_INPUTS = 65535
"""Largest size of a matrix in npu_quant_matmul."""
_LAST_AXIS = -1
_MULTIPLIES = False
"""Value of `div_mode` for factors instead of divisors."""


def multiply_dynamic(rows: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Divide each row by its largest value, and multiply it.

    Args:
        rows: [T, inputs], float16 or bfloat16.
        values: int8 [outputs, inputs].
        scales: float32 [outputs].
        bias: float32 [outputs], or None.

    Returns:
        [T, outputs] in the dtype of `rows`.

    """
    rounded, row_scales = torch.ops.npu.npu_dynamic_quant(rows)
    out: Tensor = torch.ops.npu.npu_quant_matmul(
        rounded, values.T, scales, pertoken_scale=row_scales, bias=bias, output_dtype=rows.dtype
    )
    return out


def multiply_static(
    rows: Tensor, values: Tensor, factors: Tensor, offsets: Tensor, scales: Tensor, bias: Tensor
) -> Tensor:
    """Round rows with constants, and multiply them.

    Args:
        rows: [T, inputs], float16 or bfloat16.
        values: int8 [outputs, inputs].
        factors: Factor of each input, float32 [inputs].
        offsets: The rounded value of each input that represents zero, float32 [inputs].
        scales: Factors of the integer sums, float32 [outputs].
        bias: Numbers to add to the integer sums, int32 [outputs].

    Returns:
        [T, outputs] in the dtype of `rows`.

    """
    # The operator takes factors only in the dtype of its input. In bfloat16, they would have 8 bits.
    given = rows.float(), factors, offsets, torch.qint8, _LAST_AXIS, _MULTIPLIES
    rounded = torch.ops.npu.npu_quantize(*given)
    out: Tensor = torch.ops.npu.npu_quant_matmul(rounded, values.T, scales, bias=bias, output_dtype=rows.dtype)
    return out
