"""Mixture-of-experts layers: transformers' experts and our own.

`arrange` prepares the experts of a loaded module for its device. If `Kernels.joins_experts` is true, all experts of
a layer share one tensor per product. Otherwise, each expert has linear layers of its own, which can be replaced or
quantized like other linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from mindie_mm.device import ExpertWeights, QuantizedLinear, joined_experts, kernels_of
from mindie_mm.nn.layers import is_silu

NAME = "mindie_mm"
"""Name under which `run` is registered with transformers' `ExpertsInterface`."""
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


class GatedMLP(nn.Module):
    """A gated feed-forward layer from [T, width] to [T, width]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return mixed


class Expert(nn.Module):
    """A feed-forward layer that computes gate and up in one product."""

    def __init__(self, first: nn.Module, second: nn.Module, activate: Callable[[Tensor], Tensor]) -> None:
        """Create the layer with the linear layers of both products."""
        super().__init__()
        self.first, self.second = first, second
        self.activate = activate

    @classmethod
    def of(cls, first: Tensor, second: Tensor, activate: Callable[[Tensor], Tensor]) -> Expert:
        """Create the layer from the weights of both products, [outputs, inputs] each. The weights are not copied."""
        return cls(_linear(first), _linear(second), activate)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.second(self.activate(self.first(hidden)))
        return mixed


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


class SideBySide(nn.ModuleList):
    """Linear layers with the same input, whose outputs are concatenated."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([layer(hidden) for layer in self], -1)


class Experts(nn.ModuleList):
    """Experts with layers of their own, from [n, width] to [n, width]. The host waits for the selection."""

    def __init__(self, layers: Iterable[nn.Module], start: int | None = None) -> None:
        """Create the layer. If several ranks have experts, those of this rank begin with expert `start`."""
        super().__init__(layers)
        self.start = start

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, [T, width], as `Kernels.experts` does."""
        if self.start is not None:
            chosen = joined_experts.on_rank(chosen, self.start, len(self))
        layers = [*self]
        passed = joined_experts.one_by_one(hidden, chosen, len(layers), lambda expert, rows: layers[expert](rows))
        return joined_experts.weighted_sum(passed, weights)


class JoinedExperts(nn.Module):
    """Experts that share one tensor per product, and are selected on the device."""

    def __init__(
        self,
        first: Tensor,
        second: Tensor,
        activate: Callable[[Tensor], Tensor],
        start: int | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Create the layer. `start` is that of `Experts`, and the other arguments are those of `ExpertWeights`."""
        super().__init__()
        for name, own in zip(("first_scales", "second_scales"), scales or (None, None), strict=True):
            self.register_buffer(name, own, persistent=False)
        self.first = nn.Parameter(first.detach(), requires_grad=False)
        self.second = nn.Parameter(second.detach(), requires_grad=False)
        self.activate = activate
        self.start = start

    first_scales: Tensor | None
    second_scales: Tensor | None

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, [T, width], as `Kernels.experts` does."""
        if self.start is not None:
            chosen = joined_experts.on_rank(chosen, self.start, len(self.first))
        first, second = self.first_scales, self.second_scales
        scales = None if first is None or second is None else (first, second)
        own = ExpertWeights(self.first, self.second, self.activate, self.start is not None, scales)
        return kernels_of(hidden.device).experts(hidden, chosen, weights, own)


def experts_of(
    first: Tensor, second: Tensor, activate: Callable[[Tensor], Tensor], start: int | None
) -> Experts | JoinedExperts:
    """Return a layer for the device of the weights. The arguments are those of `JoinedExperts`."""
    if kernels_of(first.device).joins_experts:
        return JoinedExperts(first, second, activate, start)
    return Experts((Expert.of(*both, activate) for both in zip(first, second, strict=True)), start)


def run(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run the experts of a transformers layer, which `arrange` has prepared."""
    mixed: Tensor = module.arranged(hidden, chosen, weights)
    return mixed


def arrange(module: nn.Module) -> None:
    """Prepare the mixture-of-experts layers in `module` for its device. `module` must be loaded.

    Experts with biases or norms of their own keep transformers' implementation. While layers of our own are joined, the
    weights of one layer are in memory twice.
    """
    for part in [*module.modules()]:
        if _is_theirs(part):
            _arrange_theirs(part)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, Experts) and _is_plain(child):
                setattr(parent, name, _joined(child))


def _is_theirs(part: Any) -> bool:
    """Return whether a module has transformers' decorator `use_experts_implementation`, and can be arranged."""
    weights = [*part.parameters(recurse=False)]
    return (
        hasattr(part, "has_post_expert_norm")
        and not (part.has_bias or part.has_post_expert_norm)
        and len(weights) == 2
        and all(weight.dim() == 3 and weight.dtype in _FLOATS for weight in weights)
    )


def can_replace(part: Any) -> bool:
    """Return whether `replace_rounding` and `replace_layers` can replace the experts of a transformers module."""
    return _is_theirs(part) and bool(part.has_gate)


def replace_rounding(
    part: Any, first: Tensor, second: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    """Let a transformers layer without weights call a layer of this module with int8 weights.

    Args:
        part: The layer.
        first: Weights of the first product, int8 on the device, as in `ExpertWeights`. Gates come before values.
        second: Weights of the second product.
        scales: Scales of both.
        dtype: The dtype of the activations.

    """
    activate = _activation(part, torch.empty(0, dtype=dtype, device=first.device))
    _call_ours(part, JoinedExperts(first, second, activate, None, scales))


def replace_layers(
    part: Any, layers: Iterable[tuple[Sequence[nn.Module], nn.Module]], device: torch.device, dtype: torch.dtype
) -> None:
    """Let a transformers layer without weights call experts with linear layers of their own.

    Args:
        part: The layer.
        layers: For each expert, the layers whose concatenated outputs are the gates and the values, and the second
            layer.
        device: The device of the layers.
        dtype: The dtype of the activations.

    """
    activate = _activation(part, torch.empty(0, dtype=dtype, device=device))
    _call_ours(part, Experts(Expert(_together(first), second, activate) for first, second in layers))


def _together(layers: Sequence[nn.Module]) -> nn.Module:
    """Return one layer whose output is the concatenated output of `layers`."""
    if len(layers) == 1:
        return layers[0]
    own = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(own) == len(layers):
        with suppress(ValueError):  # they round their input differently
            return own[0].joined(own)
    return SideBySide(layers)


def _call_ours(part: Any, ours: Experts | JoinedExperts) -> None:
    from transformers.integrations.moe import ExpertsInterface  # late: the import takes seconds

    ExpertsInterface.register(NAME, run)
    part.config._experts_implementation = NAME  # noqa: SLF001 - there is no public name
    part.arranged = ours


def _arrange_theirs(part: Any) -> None:
    """Move the weights of a transformers layer to a layer of this module, which it then calls."""
    name = "gate_up_proj" if part.has_gate else "up_proj"
    first, second = getattr(part, name).detach(), part.down_proj.detach()
    if part.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    activate = _activation(part, first)
    delattr(part, name)
    del part.down_proj
    # transformers sets this attribute if a plan of `weights/shares.py` divides the experts among ranks.
    start = dist.get_rank() * len(first) if part._is_expert_parallel else None  # noqa: SLF001
    _call_ours(part, experts_of(first, second, activate, start))


def _activation(part: Any, weight: Tensor) -> Callable[[Tensor], Tensor]:
    from transformers.integrations.moe import _default_apply_gate

    if part.has_gate and type(part)._apply_gate is _default_apply_gate and is_silu(part.act_fn, weight):  # noqa: SLF001
        return kernels_of(weight.device).swiglu
    own: Callable[[Tensor], Tensor] = part._apply_gate if part.has_gate else part.act_fn  # noqa: SLF001
    return own


def _is_plain(experts: Experts) -> bool:
    """Return whether the experts are `GatedMLP`s whose linear layers a device joins."""
    linears = [layer for expert in experts for layer in expert.children()]
    if any(type(expert) is not GatedMLP for expert in experts):
        return False
    if all(type(linear) is nn.Linear for linear in linears):
        return kernels_of(linears[0].weight.device).joins_experts  # type: ignore[arg-type]
    return all(
        isinstance(linear, QuantizedLinear)
        and linear.rounds_input
        and linear.input_scale is None
        and linear.bias is None
        and kernels_of(linear.values.device).rounds_experts
        for linear in linears
    )


def _joined(experts: Experts) -> JoinedExperts:
    """Return one layer with the weights of `experts`."""
    layers: list[list[Any]] = [
        [expert.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")] for expert in experts
    ]
    scales = None
    if isinstance(layers[0][0], QuantizedLinear):
        parts = [[layer.values for layer in each] for each in layers]
        own = [[layer.scales.flatten() for layer in each] for each in layers]
        scales = torch.stack([torch.cat(each[:2]) for each in own]), torch.stack([each[2] for each in own])
    else:
        parts = [[layer.weight for layer in each] for each in layers]
    gate = parts[0][0]
    inner, width = gate.shape
    first, second = gate.new_empty(len(parts), 2 * inner, width), gate.new_empty(len(parts), width, inner)
    for (one, up, down), into, back in zip(parts, first, second, strict=True):
        into[:inner].copy_(one)
        into[inner:].copy_(up)
        back.copy_(down)
    return JoinedExperts(first, second, kernels_of(gate.device).swiglu, None, scales)
