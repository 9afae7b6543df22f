"""Limits of the operators of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.ascend.operators.refusals import DOCS, FLOAT, PARAMETER, Arguments, Limit, dtypes

_ROUTING = ("npu::npu_moe_init_routing_v2",)
_PRODUCT = ("npu::npu_grouped_matmul",)
_SUM = ("npu::npu_moe_token_unpermute",)
_SCALES = {(torch.bfloat16, 15), (torch.bfloat16, torch.bfloat16), (torch.float32, 5), (torch.float32, torch.float16)}
"""Dtypes of the scales of weights, and of the results."""


def _routed_shapes(given: Arguments) -> Iterator[str]:
    x, ids = given["x"], given["expert_idx"]
    if x.dim() != 2 or ids.dim() != 2 or len(x) != len(ids):
        yield f"x {tuple(x.shape)} and expert_idx {tuple(ids.shape)} must have two axes, and as many rows."


def _routed_modes(given: Arguments) -> Iterator[str]:
    if given["drop_pad_mode"] != 0:
        yield f"drop_pad_mode {given['drop_pad_mode']} must be 0."
    if given["expert_tokens_num_type"] not in {1, 2} or not given["expert_tokens_num_flag"]:
        yield "expert_tokens_num_type must be 1 or 2, and expert_tokens_num_flag True."
    if given["quant_mode"] not in {-1, 1}:
        yield f"quant_mode {given['quant_mode']} must be -1 or 1."
    if given["active_num"] not in {-1, 0, given["expert_idx"].numel()}:
        yield f"active_num {given['active_num']} must be NUM_ROWS * K."


def _routed_range(given: Arguments) -> Iterator[str]:
    start, stop = given["active_expert_range"] or (0, given["expert_num"])
    if not 0 <= start < stop <= given["expert_num"] <= 10240:
        yield f"active_expert_range [{start}, {stop}] must be increasing, within expert_num {given['expert_num']}."


def _routed_scales(given: Arguments) -> Iterator[str]:
    scale, rows = given["scale"], len(given["x"])
    if given["offset"] is not None:
        yield "offset is not simulated."
    if scale is not None and (given["quant_mode"] != -1 or scale.dtype != torch.float32 or scale.shape != (rows,)):
        yield f"scale {scale.dtype} {tuple(scale.shape)} must be float32 ({rows},), and quant_mode -1."


def _product_dtypes(given: Arguments) -> Iterator[str]:
    if given["x"][0].dtype == torch.int8:
        return
    for name in ("x", "weight"):
        for tensor in given[name]:
            yield from dtypes(FLOAT, name)({name: tensor})
            if tensor.dtype != given["x"][0].dtype:
                yield f"Tensor {name} expected dtype is {given['x'][0].dtype} but found {tensor.dtype}."


def _rounded_product(given: Arguments) -> Iterator[str]:
    x, weight, scales, row_scales = (given[name] for name in ("x", "weight", "scale", "per_token_scale"))
    if x[0].dtype != torch.int8:
        if scales or row_scales:
            yield "scale and per_token_scale are only for x in int8."
        return
    if weight[0].dtype != torch.int8 or not scales or not row_scales:
        yield f"x in int8 needs weight in int8, not {weight[0].dtype}, and in this simulator both scales."
        return
    if (scales[0].dtype, given["output_dtype"]) not in _SCALES:
        yield f"scale {scales[0].dtype} and output_dtype {given['output_dtype']} are not supported together."
    if scales[0].shape != (len(weight[0]), weight[0].shape[-1]):
        yield f"scale {tuple(scales[0].shape)} must be (E, N) of weight {tuple(weight[0].shape)}."
    if row_scales[0].dtype != torch.float32 or row_scales[0].shape != (len(x[0]),):
        yield f"per_token_scale {row_scales[0].dtype} {tuple(row_scales[0].shape)} must be float32 ({len(x[0])},)."
    if given["bias"]:
        yield "bias is not simulated."


def _product_groups(given: Arguments) -> Iterator[str]:
    groups, weights = given["group_list"], given["weight"]
    if not isinstance(groups, Tensor) or groups.dtype != torch.int64 or groups.dim() != 1:
        yield "group_list must be int64 with one axis."
        return
    if len(groups) != len(weights[0]) or len(groups) > 1024:
        yield f"group_list has {len(groups)} groups, weight {len(weights[0])}; at most 1024 are supported."
    if given["group_list_type"] not in {0, 1} or (given["group_list_type"] == 1 and len(groups) == 1):
        yield f"group_list_type {given['group_list_type']} does not support {len(groups)} groups."


def _product_shapes(given: Arguments) -> Iterator[str]:
    if given["group_type"] != 0 or given["split_item"] not in {2, 3}:
        yield "group_type must be 0 and split_item 2 or 3 for single tensors."
    if len(given["x"]) != 1 or len(given["weight"]) != 1:
        yield "only single tensors are simulated."
    x, weight = given["x"][0], given["weight"][0]
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        yield f"x {tuple(x.shape)} must be (M, K), weight {tuple(weight.shape)} (E, K, N)."
    elif max(x.shape[1], weight.shape[2]) >= 65536:
        yield f"the inner axes {x.shape[1]} and {weight.shape[2]} must be less than 65536."
    if not x.is_contiguous():
        yield "x must not be transposed."


def _sum_shapes(given: Arguments) -> Iterator[str]:
    rows, places, probs = given["permuted_tokens"], given["sorted_indices"], given["probs"]
    if rows.dim() != 2 or places.dim() != 1 or given["padded_mode"]:
        yield "permuted_tokens must have two axes, sorted_indices one, and padded_mode must be False."
    elif probs is not None and (probs.dim() != 2 or probs.numel() != len(places)):
        yield f"probs {tuple(probs.shape)} must be (num_tokens, topK) for {len(places)} indices."


LIMITS = (
    Limit(_ROUTING, f"{DOCS}, npu_moe_init_routing_v2: x", PARAMETER, dtypes((*FLOAT, torch.int8), "x")),
    Limit(_ROUTING, f"{DOCS}, npu_moe_init_routing_v2: expert_idx", PARAMETER, dtypes((torch.int32,), "expert_idx")),
    Limit(_ROUTING, f"{DOCS}, npu_moe_init_routing_v2: scale without quantization", PARAMETER, _routed_scales),
    Limit(_ROUTING, f"{DOCS}, npu_moe_init_routing_v2: shapes", PARAMETER, _routed_shapes),
    Limit(
        _ROUTING,
        f"{DOCS}, npu_moe_init_routing_v2: modes; active_num in Ascend/op-plugin 1bd23ce26",
        PARAMETER,
        _routed_modes,
    ),
    Limit(_ROUTING, f"{DOCS}, npu_moe_init_routing_v2: active_expert_range", PARAMETER, _routed_range),
    Limit(_PRODUCT, f"{DOCS}, npu_grouped_matmul: dtypes that are not quantized", PARAMETER, _product_dtypes),
    Limit(_PRODUCT, f"{DOCS}, npu_grouped_matmul: table 2, per token", PARAMETER, _rounded_product),
    Limit(_PRODUCT, f"{DOCS}, npu_grouped_matmul: group_list", PARAMETER, _product_groups),
    Limit(_PRODUCT, f"{DOCS}, npu_grouped_matmul: single tensors, InnerLimit", PARAMETER, _product_shapes),
    Limit(
        _SUM,
        "cann/ops-transformer, moe/moe_token_permute: FLOAT16, BFLOAT16, FLOAT32",
        PARAMETER,
        dtypes(FLOAT, "permuted_tokens", "probs"),
    ),
    Limit(
        _SUM,
        f"{DOCS}, npu_moe_token_unpermute: int64, int32 in its example",
        PARAMETER,
        dtypes((torch.int32, torch.int64), "sorted_indices"),
    ),
    Limit(_SUM, f"{DOCS}, npu_moe_token_unpermute: shapes and padded_mode", PARAMETER, _sum_shapes),
)
