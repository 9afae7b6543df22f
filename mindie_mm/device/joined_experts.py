"""Mixtures of experts in plain PyTorch, with the weights of all experts in one tensor.

A copy of the selection to the host would wait for the device in every layer. Small batches therefore select the experts
on the device.

`chosen`, int64 [T, count], are the experts of each row of `hidden`, [T, width]. The results are the outputs of these
experts, [T, count, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from mindie_mm.device.quantized_linear import QuantizedLinear, QuantizedWeight

_MOST_UNSORTED = 256
"""Maximum number of rows to run through all experts.

Up to a few hundred rows, reading the weights takes longer than multiplying by them.
"""
_GATHERING_COST = 3
"""Memory traffic of a gathered expert, as a multiple of its size. Its weights are read, written, and read again."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, or a rank's share of them."""

    first: Tensor
    """Weights of the first product of all experts, [experts, outputs, width]."""
    second: Tensor
    """Weights of the second product of all experts, [experts, width, inner]."""
    activate: Callable[[Tensor], Tensor]
    """Function from the outputs of the first product, [..., outputs], to [..., inner]."""
    is_share: bool = False
    """True if other ranks have experts, too. `chosen` is `len(first)` for these, and their outputs are zeros."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of the rows of int8 weights of both products, float32 [experts, outputs]. The inputs of both products are
    then rounded to 8 bits, and divided by their largest values first."""


def run(hidden: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Run the chosen experts in the way that is fastest for the number of rows."""
    count = len(experts.first)
    if len(hidden) > _MOST_UNSORTED or experts.scales is not None:
        return by_sorting(hidden, chosen, experts)
    way = by_gathering if _GATHERING_COST * chosen.numel() <= count else by_all
    if not experts.is_share:
        return way(hidden, chosen, experts)
    return without_others(way(hidden, chosen.clamp(max=count - 1), experts), chosen, count)


def by_sorting(hidden: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Run one expert after another. The host waits for the number of rows of each expert."""

    def passed_by(expert: int, rows: Tensor) -> Tensor:
        if experts.scales is None:
            return linear(experts.activate(linear(rows, experts.first[expert])), experts.second[expert])
        first, second = (scales[expert].unsqueeze(1) for scales in experts.scales)
        inner = experts.activate(_rounded_product(rows, experts.first[expert], first))
        return _rounded_product(inner, experts.second[expert], second)

    return one_by_one(hidden, chosen, len(experts.first), passed_by)


def _rounded_product(rows: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    layer = QuantizedLinear(QuantizedWeight(values, scales, rounds_input=True), None)
    return layer(rows)  # type: ignore[no-any-return]


def one_by_one(hidden: Tensor, chosen: Tensor, num_experts: int, passed_by: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Call `passed_by` with each expert and its rows [n, width]. The host waits for the number of rows."""
    order, counts = sort_rows(chosen, num_experts)
    *parts, rest = hidden[order // chosen.shape[1]].split(counts.tolist())
    passed = [passed_by(expert, part) for expert, part in enumerate(parts) if len(part)]
    if len(rest):
        passed.append(torch.zeros_like(rest))
    return unsort_rows(torch.cat(passed), order, chosen)


def by_gathering(hidden: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Multiply each row by copies of its experts' weights."""
    into, back = (weight.index_select(0, chosen.flatten()) for weight in (experts.first, experts.second))
    rows = hidden.unsqueeze(1).expand(-1, chosen.shape[1], -1).reshape(-1, hidden.shape[1], 1)
    passed: Tensor = back @ experts.activate((into @ rows).squeeze(2)).unsqueeze(2)
    return passed.view(*chosen.shape, -1)


def by_all(hidden: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Run all rows through all experts and keep the chosen outputs."""
    inner = experts.activate(hidden @ experts.first.transpose(1, 2))
    passed = inner @ experts.second.transpose(1, 2)  # (experts, T, width)
    return passed[chosen, torch.arange(len(hidden), device=hidden.device).unsqueeze(1)]


def sort_rows(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the indices in `chosen.flatten()` sorted by expert, and the number of rows of each expert.

    The last number is the number of rows of other ranks.
    """
    flat = chosen.flatten()
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts


def unsort_rows(passed: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows [T * count, width], sorted by `order`, as [T, count, width].

    The sum over a token's experts then does not depend on the rest of the batch.
    """
    return torch.empty_like(passed).index_copy_(0, order, passed).view(*chosen.shape, -1)


def without_others(passed: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """Set the outputs [T, count, width] of other ranks' experts to zero."""
    return passed.masked_fill((chosen == num_experts).unsqueeze(-1), 0)


def on_rank(chosen: Tensor, start: int, num_experts: int) -> Tensor:
    """Number the `chosen` experts as a rank does that has `num_experts` experts, the first of which is `start`.

    Experts of other ranks become `num_experts`.
    """
    own = chosen - start
    return own.where((own >= 0) & (own < num_experts), num_experts)


def weighted_sum(passed: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the experts' outputs [T, count, width] with their weights [T, count], in float32 inside."""
    return (passed.float() * weights.unsqueeze(-1)).sum(1).to(passed.dtype)
