"""Operators of mixtures of experts. Rows that the device does not write are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators.quantized import DTYPES

_UNWRITTEN = 101
"""Value of integers that the device does not write."""


def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    expert_num: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort rows by expert. Return the rows, their places, the number of rows of each active expert, and their scales.

    With `row_idx_type` 0, the places are the positions of the rows in the result, or -1 for experts that are not
    active. With 1, they are the indices of the sorted rows.
    """
    start, stop = active_expert_range or (0, expert_num)
    flat = expert_idx.flatten().long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < expert_num:
        raise RuntimeError(f"expert_idx goes from {int(flat.min())} to {int(flat.max())}, expert_num is {expert_num}")
    is_active = (flat >= start) & (flat < stop)
    order = flat.where(is_active, expert_num).argsort(stable=True)[: int(is_active.sum())]
    rows = torch.full((len(flat), x.shape[1]), torch.nan if x.is_floating_point() else _UNWRITTEN).to(x.dtype)
    rows[: len(order)] = x[order // expert_idx.shape[1]]
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    if row_idx_type:
        places[: len(order)] = order.int()
    else:
        places[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(flat[is_active] - start, minlength=stop - start)
    scales = torch.full((len(flat),), torch.nan)
    if scale is not None:
        scales[: len(order)] = scale[order // expert_idx.shape[1]]
    return rows, places, counts, scales


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor,
    group_list_type: int = 0,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: int | torch.dtype | None = None,
    **unused: Any,
) -> list[Tensor]:
    """Multiply the rows of each group by its weight. `group_list` has the last row of each group, or its size (1).

    Sums of int8 products are exact, and multiplied by the scales of the weight's columns and of the rows.
    """
    rows, weights = x[0], weight[0]
    stops = (group_list.cumsum(0) if group_list_type else group_list).tolist()
    if stops[-1] > len(rows):
        raise RuntimeError(f"group_list has {stops[-1]} rows, x has {len(rows)}")
    dtype = rows.dtype if output_dtype is None else DTYPES.get(output_dtype, output_dtype)
    out = torch.full((len(rows), weights.shape[2]), torch.nan).to(dtype)
    for group, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        if scale is None or per_token_scale is None:
            out[start:stop] = (rows[start:stop].float() @ weights[group].float()).to(dtype)
            continue
        sums = (rows[start:stop].double() @ weights[group].double()).float()
        factors = scale[0][group].float() * per_token_scale[0][start:stop].unsqueeze(1)
        out[start:stop] = (sums * factors).to(dtype)
    return [out]


def moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, **unused: Any
) -> Tensor:
    """Return the sum of the rows of each token, weighted by `probs`."""
    count = 1 if probs is None else probs.shape[1]
    places = sorted_indices.long()
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < len(permuted_tokens):
        raise RuntimeError(f"sorted_indices goes from {int(places.min())} to {int(places.max())}")
    rows = permuted_tokens[places].float().unflatten(0, (-1, count))
    weighted = rows if probs is None else rows * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)
