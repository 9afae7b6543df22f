"""Mixtures of experts with fused operators of torch_npu. The device selects the experts, and the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor

from mindie_mm.device import joined_experts
from mindie_mm.device.joined_experts import ExpertWeights

NAME, ROUNDED = "npu_grouped_matmul", "npu_grouped_matmul (npu_dynamic_quant)"
_MAX_EXPERTS = 1024
_MAX_WIDTH = 65535
_ROUTED = {"drop_pad_mode": 0, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
"""Settings of the routing: no expert drops rows, the result has the number of rows of each expert, and rows are not
quantized, because each row is rounded only once before it is copied to its experts."""


def supports(experts: ExpertWeights) -> bool:
    """Return whether the documentation of the operators allows these weights."""
    widths = *experts.first.shape[1:], *experts.second.shape[1:]
    return 1 < len(experts.first) <= _MAX_EXPERTS and max(widths) <= _MAX_WIDTH


def run(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Return the weighted sum of the outputs of each row's experts, with the arguments of `Kernels.experts`."""
    count = len(experts.first)
    given, given_scales = hidden, None
    if experts.scales is not None:
        given, given_scales = torch.ops.npu.npu_dynamic_quant(hidden)
    rows, places, counts, row_scales = torch.ops.npu.npu_moe_init_routing_v2(
        given,
        chosen.int(),
        scale=given_scales,
        active_num=chosen.numel(),
        expert_num=count + experts.is_share,
        active_expert_range=[0, count],
        **_ROUTED,
    )
    if experts.scales is None:
        passed = _product(experts.activate(_product(rows, experts.first, counts)), experts.second, counts)
    else:
        first, second = experts.scales
        inner = experts.activate(_rounded_product(rows, row_scales, experts.first, first, counts, hidden.dtype))
        rounded, inner_scales = torch.ops.npu.npu_dynamic_quant(inner)
        passed = _rounded_product(rounded, inner_scales, experts.second, second, counts, hidden.dtype)
    if experts.is_share:  # rows after the last expert are undefined, and their places are -1
        passed = passed.index_select(0, places.clamp(min=0)).view(*chosen.shape, -1)
        return joined_experts.weighted_sum(joined_experts.without_others(passed, chosen, count), weights)
    mixed: Tensor = torch.ops.npu.npu_moe_token_unpermute(passed, places, weights.to(passed.dtype))
    return mixed


def _product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows by the weight of their expert. `counts` are the rows of each expert, int64 [experts]."""
    products: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight.transpose(1, 2)], group_list=counts, group_list_type=1, group_type=0, split_item=2
    )
    return products[0]


def _rounded_product(
    rows: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply int8 rows by the int8 weight of their expert, as in `_product`. Sums of integers are exact.

    For results in bfloat16, the operator takes the scales of the weights only in bfloat16.
    """
    products: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(1, 2)],
        scale=[scales.to(torch.bfloat16) if dtype == torch.bfloat16 else scales],
        per_token_scale=[row_scales],
        group_list=counts,
        group_list_type=1,
        group_type=0,
        split_item=2,
        output_dtype=dtype,
    )
    return products[0]
