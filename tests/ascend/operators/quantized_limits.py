"""Limits of the operators of 8-bit integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ascend.operators.refusals import DOCS, FLOAT, HALF, PARAMETER, Arguments, Limit, contiguous, dtypes

_QUANTIZE = ("npu::npu_quantize",)
_DYNAMIC = ("npu::npu_dynamic_quant",)
_PRODUCT = ("npu::npu_quant_matmul",)
_PAGES = "Ascend/op-plugin, docs/context/torch_npu-npu_quant_matmul.md"
_BF16, _FP16, _INT8 = (15, torch.bfloat16), (5, torch.float16), (None, 1, torch.int8)


def _factors(given: Arguments) -> Iterator[str]:
    scales, zeros, width = given["scales"], given["zero_points"], given["input"].shape[-1]
    if given["div_mode"]:
        yield "only div_mode False is simulated."
    if scales.dtype != given["input"].dtype or scales.dim() != 1 or len(scales) not in {1, width}:
        yield f"scales {scales.dtype} {tuple(scales.shape)} must have the dtype of input, and 1 or {width} numbers."
    if zeros is not None and (zeros.dtype, zeros.shape) != (scales.dtype, scales.shape):
        yield f"zero_points {zeros.dtype} {tuple(zeros.shape)} must have the dtype and the shape of scales."


def _plain(given: Arguments) -> Iterator[str]:
    if given["input"].dim() < 2:
        yield "input must have at least two axes."
    for name in ("smooth_scales", "group_index"):
        if given[name] is not None:
            yield f"{name} is not simulated."


def _shapes(given: Arguments) -> Iterator[str]:
    x1, x2, scale = given["x1"], given["x2"], given["scale"]
    if x1.dim() != 2 or x2.dim() != 2 or x1.shape[1] != x2.shape[0]:
        yield f"x1 {tuple(x1.shape)} must be (M, K), x2 {tuple(x2.shape)} (K, N)."
        return
    if not x1.numel():
        yield "x1 must not be empty."
    if max(x1.shape[1], x2.shape[1]) > 65535:
        yield f"the last axes {x1.shape[1]} and {x2.shape[1]} must be at most 65535."
    if scale.dim() != 1 or len(scale) not in {1, x2.shape[1]}:
        yield f"scale {tuple(scale.shape)} must have 1 or {x2.shape[1]} numbers."
    for name, length in (("bias", x2.shape[1]), ("pertoken_scale", x1.shape[0])):
        if given[name] is not None and tuple(given[name].shape) != (length,):
            yield f"{name} {tuple(given[name].shape)} must be ({length},)."


def _combinations(given: Arguments) -> Iterator[str]:
    scale, rows, bias, out = (given[name] for name in ("scale", "pertoken_scale", "bias", "output_dtype"))
    kind = None if bias is None else bias.dtype
    if out in _BF16:
        allowed = scale.dtype in (torch.float32, torch.bfloat16)
        allowed = allowed and kind in (None, torch.int32, torch.bfloat16, torch.float32)
    elif out in _FP16 and rows is not None:
        allowed = scale.dtype == torch.float32 and kind in (None, torch.int32, torch.bfloat16, torch.float32)
    else:
        allowed = out in (*_FP16, *_INT8) and rows is None and scale.dtype in (torch.float32, torch.int64)
        allowed = allowed and kind in (None, torch.int32)
    if not allowed:
        yield f"scale {scale.dtype}, bias {kind} and output_dtype {out} are not supported together."


LIMITS = (
    Limit(_QUANTIZE, f"{DOCS}, npu_quantize: input", PARAMETER, dtypes(FLOAT, "input")),
    Limit(_QUANTIZE, f"{DOCS}, npu_quantize: scales and zero_points with div_mode False", PARAMETER, _factors),
    Limit(_DYNAMIC, f"{DOCS}, npu_dynamic_quant: x", PARAMETER, dtypes(HALF, "input")),
    Limit(_DYNAMIC, f"{DOCS}, npu_dynamic_quant: at least two axes", PARAMETER, _plain),
    Limit(_PRODUCT, f"{_PAGES}: x1 and x2", PARAMETER, dtypes((torch.int8,), "x1", "x2")),
    Limit(_PRODUCT, f"{_PAGES}: pertoken_scale", PARAMETER, dtypes((torch.float32,), "pertoken_scale")),
    Limit(_PRODUCT, f"{_PAGES}: x1 is contiguous", PARAMETER, contiguous("x1")),
    Limit(_PRODUCT, f"{_PAGES}: shapes", PARAMETER, _shapes),
    Limit(_PRODUCT, f"{_PAGES}: table 2", PARAMETER, _combinations),
)
