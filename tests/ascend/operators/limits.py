"""Limits of an Ascend 910B (Atlas A2), each with its source. A call that exceeds a limit raises torch_npu's error.

If sources differ, the limits are those of the newest CANN, which is the release for torch_npu 2.13. Other products and
older releases have further limits (product_limits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.ascend.operators import attention_limits, expert_limits, layer_limits, product_limits, quantized_limits
from tests.ascend.operators.refusals import FLOAT, PARAMETER, Arguments, Limit, dtypes

_TORCHS = (
    Limit(
        ("aten::mm", "aten::matmul"),
        "CANN 8.5 API, aclnnMm and aclnnMatmul: BFLOAT16, FLOAT16, FLOAT32 on Atlas A2",
        PARAMETER,
        dtypes(FLOAT, "self", "mat2", "tensor2", "other"),
    ),
    Limit(
        ("aten::bmm",),
        "cann/ops-nn, matmul/batch_mat_mul_v3/docs/aclnnBatchMatMul.md: BFLOAT16, FLOAT16, FLOAT32",
        PARAMETER,
        dtypes(FLOAT, "self", "mat2"),
    ),
    Limit(
        ("aten::addmm", "aten::baddbmm"),
        "the products of aclnnMm and aclnnBatchMatMul, as above; a page of their own was not found",
        PARAMETER,
        dtypes(FLOAT, "mat1", "mat2", "batch1", "batch2"),
    ),
    Limit(
        ("aten::softmax", "aten::_softmax"),
        "CANN 8.5 API, aclnnSoftmax: FLOAT16, FLOAT32, DOUBLE, BFLOAT16 on Atlas A2",
        PARAMETER,
        dtypes((*FLOAT, torch.float64), "self"),
    ),
    Limit(
        ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"),
        "CANN 8.5 API, aclnnConvolution: FLOAT, FLOAT16, BFLOAT16 on Atlas A2",
        PARAMETER,
        dtypes(FLOAT, "input", "weight", "bias"),
    ),
    Limit(
        ("aten::native_layer_norm",),
        "CANN 8.5 API, aclnnLayerNorm: FLOAT, FLOAT16, BFLOAT16 on Atlas A2",
        PARAMETER,
        dtypes(FLOAT, "input", "weight", "bias"),
    ),
    Limit(
        ("aten::gelu", "aten::gelu_"),
        "CANN 8.5 API, aclnnGeluV2: FLOAT32, FLOAT16, BFLOAT16 on Atlas A2",
        PARAMETER,
        dtypes(FLOAT, "self"),
    ),
    Limit(
        ("aten::silu", "aten::silu_"),
        "CANN 8.5 API, aclnnSilu: FLOAT, FLOAT16, BFLOAT16 on Atlas A2",
        PARAMETER,
        dtypes(FLOAT, "self"),
    ),
)

_INDEX_FILL = (
    "writes a copy of the whole tensor and that back into it (hicann/ops-nn, index/index_fill_d/op_api/"
    "aclnn_index_fill.cpp: IndexFill, then ViewCopy), and where CANN has no aclnnInplaceIndexFill reads every index on "
    "the host (Ascend/op-plugin, op_plugin/ops/opapi/IndexFillKernelNpuOpApi.cpp: get_index_vector)"
)
DEAR: Mapping[str, str] = {"aten::index_fill": _INDEX_FILL, "aten::index_fill_": _INDEX_FILL}
"""Operators that are slow on the device, with the reason and its source.

The simulator cannot show that an operator is slow, so calls to these operators are refused.
"""

LIMITS: tuple[Limit, ...] = (
    *_TORCHS,
    *attention_limits.LIMITS,
    *layer_limits.LIMITS,
    *expert_limits.LIMITS,
    *quantized_limits.LIMITS,
)


class Refused(RuntimeError):
    """The error that torch_npu raises. It also contains the limit, which tests compare."""

    def __init__(self, words: str, limit: Limit) -> None:
        super().__init__(words)
        self.limit = limit


def of(operator: str) -> Callable[[Arguments], None] | None:
    """Return a function that checks the arguments of a call, or None if the operator has no known limits."""
    if operator in DEAR:
        return lambda _: _too_dear(operator)
    found = [limit for limit in (*product_limits.LIMITS, *LIMITS) if operator in limit.operators]
    return (lambda arguments: _check(operator, found, arguments)) if found else None


def _too_dear(operator: str) -> None:
    raise RuntimeError(f"{operator} is not called on an NPU: it {DEAR[operator]}")


def _check(operator: str, limits: list[Limit], arguments: Arguments) -> None:
    for limit in filter(Limit.holds, limits):
        for refusal in limit.refusals(arguments):
            # The format follows issue 8045 and pull request 9632 of vllm-ascend, and CANN's OP_CHECK_DTYPE_NOT_SUPPORT.
            kind = "AclNN_Parameter_Error(EZ1001)" if limit.code == PARAMETER else "E89999: Inner Error! E89999"
            raise Refused(
                f"{operator.partition('::')[2]}: NPU function error: call aclnn failed, error code is {limit.code}\n"
                f"[ERROR] ERR00100 PTA call acl api failed.\n{kind}: {refusal}",
                limit,
            )
