"""Mixture-of-experts layers of the DeepSeek models (DeepSeekMoE, Dai et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from mindie_mm.device import Device

_MOST_UNSORTED = 256
"""Maximum number of rows to run through all experts.

Up to a few hundred rows, reading the weights takes longer than multiplying by them.
"""
_GATHERING_COST = 3
"""Memory traffic of a gathered expert, as a multiple of its size. Its weights are read, written, and read again."""


class MLP(nn.Module):
    """A gated feed-forward layer from [T, width] to [T, width]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return mixed


class Gate(nn.Module):
    """The router, which chooses the experts of each token. It computes in float32."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        experts = config["n_routed_experts"]
        self.weight = nn.Parameter(torch.empty(experts, config["hidden_size"]))
        self.method = config.get("topk_method", "greedy")
        if self.method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(torch.empty(experts))
        self.softmax = config.get("scoring_func", "softmax") == "softmax"
        self.count: int = config["num_experts_per_tok"]
        self.groups: int = config.get("n_group") or 1
        self.kept_groups: int = config.get("topk_group") or 1
        self.normalised = self.count > 1 and config.get("norm_topk_prob", False)
        self.factor: float = config.get("routed_scaling_factor", 1.0)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for [T, width]. Return their weights (float32) and indices (int64), [T, count] each."""
        logits = linear(hidden.float(), self.weight.float())
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        chosen = self._ranked(scores).topk(self.count, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return the scores by which experts are chosen. Scores in dropped groups are minus infinity."""
        if self.method == "greedy":
            return scores
        ranked = scores + self.e_score_correction_bias.float() if self.method == "noaux_tc" else scores
        grouped = ranked.unflatten(-1, (self.groups, -1))
        by_group = grouped.topk(2 if self.method == "noaux_tc" else 1, dim=-1).values.sum(-1)
        kept = by_group.topk(self.kept_groups, dim=-1).indices
        dropped = torch.ones_like(by_group, dtype=torch.bool).scatter_(1, kept, value=False)
        masked: Tensor = grouped.masked_fill(dropped.unsqueeze(-1), -math.inf)
        return masked.flatten(1)


class Experts(nn.Module):
    """A mixture-of-experts layer with routed experts and, in some models, shared experts.

    On an accelerator, a decode step selects the experts on the device. Copying the selection to the host would
    synchronize with the device in every layer.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(width, inner) for _ in range(config["n_routed_experts"]))
        shared = config.get("n_shared_experts")
        self.shared_experts = MLP(width, inner * shared) if shared else None
        self._joined: tuple[Tensor, Tensor] | None = None

    def is_plain(self) -> bool:
        """Return whether all experts are unquantized. `join` cannot concatenate packed weights."""
        return all(type(layer) is nn.Linear for expert in self.experts for layer in expert.children())

    def join(self) -> None:
        """Move the weights of all experts into two tensors: gate_proj with up_proj, and down_proj.

        While this method runs, the layer needs twice its memory.
        """
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        gate = self.experts[0].get_parameter(names[0])
        first = gate.new_empty(len(self.experts), 2, *gate.shape)
        second = gate.new_empty(len(self.experts), *gate.t().shape)
        for expert, into, back in zip(self.experts, first, second, strict=True):
            for name, place in zip(names, (*into, back), strict=True):
                expert.get_parameter(name).data = place.copy_(expert.get_parameter(name))
        self._joined = first.flatten(1, 2), second

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden)
        if self._joined is None or len(hidden) > _MOST_UNSORTED:
            passed = self.sorted(hidden, chosen)
        elif _GATHERING_COST * chosen.numel() <= len(self.experts):
            passed = self.gathered(hidden, chosen)
        else:
            passed = self.all(hidden, chosen)
        mixed: Tensor = (passed.float() * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)

    # The next three methods take `hidden` [T, width] and `chosen` int64 [T, count]. They return the outputs of the
    # chosen experts, [T, count, width], and differ only by rounding.

    def sorted(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Run one expert after another. The host waits for the number of rows of each expert."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(len(self.experts)).scatter_add_(0, flat, torch.ones_like(flat)).tolist()
        parts = hidden[order // chosen.shape[1]].split(counts)
        passed = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        # Restore the token order, so that the sum of a token does not depend on the rest of the batch.
        sorted_back: Tensor = torch.empty_like(passed).index_copy_(0, order, passed)
        return sorted_back.view(*chosen.shape, -1)

    def gathered(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Multiply each row by copies of its experts' weights."""
        assert self._joined is not None
        first, second = (weight.index_select(0, chosen.flatten()) for weight in self._joined)
        rows = hidden.unsqueeze(1).expand(-1, chosen.shape[1], -1).reshape(-1, hidden.shape[1], 1)
        gate, up = (first @ rows).chunk(2, dim=1)
        passed: Tensor = second @ (silu(gate) * up)
        return passed.view(*chosen.shape, -1)

    def all(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Run all rows through all experts and keep the chosen outputs."""
        assert self._joined is not None
        first, second = self._joined
        both = linear(hidden, first.flatten(0, 1)).unflatten(1, (len(first), 2, -1))  # (T, experts, 2, inner)
        inner = (silu(both[:, :, 0]) * both[:, :, 1]).transpose(0, 1)
        passed: Tensor = inner @ second.transpose(1, 2)  # (experts, T, width)
        return passed[chosen, torch.arange(len(hidden), device=hidden.device).unsqueeze(1)]


def join_experts(module: nn.Module, device: Device) -> None:
    """Prepare the mixture-of-experts layers in `module` to select experts on `device`.

    `module` must be loaded and placed. On the CPU, this function does nothing, and the layers use
    `Experts.sorted`.
    """
    if device.torch_device.type != "cpu":
        for part in module.modules():
            if isinstance(part, Experts) and part.is_plain():
                part.join()
