"""Tests for mixture-of-experts layers against transformers' own implementation, for all ways to multiply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mindie_mm.device import ExpertWeights, joined_experts
from mindie_mm.device.cpu.cpu_kernels import CPUKernels
from mindie_mm.device.cpu.onednn_linear import OneDNNLinear, has_onednn, use_onednn
from mindie_mm.nn import experts
from mindie_mm.nn.experts import Expert, Experts, GatedMLP, JoinedExperts

EXPERTS, COUNT, WIDTH, INNER = 12, 3, 16, 8
CHOSEN = torch.tensor([[11, 0, 4], [4, 5, 6], [0, 1, 2], [11, 10, 9], [4, 0, 11]])


@use_experts_implementation(is_transposed=True)
class Transposed(DeepseekV2Experts):
    """Experts whose weights have their inputs before their outputs, as in Aria."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))


@use_experts_implementation(has_gate=False)
class Ungated(nn.Module):
    """Experts with a plain feed-forward layer, as in Nemotron-H."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, *_: Any) -> None:
        raise NotImplementedError


@use_experts_implementation
class Clamped(DeepseekV2Experts):
    """Experts with a gate of their own, as in Step3."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=1.0) * up.clamp(-1.0, 1.0)


def layer_of(cls: type[Any], **settings: Any) -> nn.Module:
    """Return a model with one layer of transformers' experts with random weights."""
    torch.manual_seed(0)
    config = SimpleNamespace(num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=WIDTH, hidden_act="silu")
    vars(config).update(moe_intermediate_size=INNER, intermediate_size=INNER, _experts_implementation="batched_mm")
    vars(config).update(settings)
    model = nn.Module()
    model.experts = cls(config).requires_grad_(False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(len(CHOSEN), WIDTH).to(dtype), CHOSEN, torch.rand(CHOSEN.shape).to(dtype)


@pytest.fixture(params=["layers", "joined"])
def kind(request, monkeypatch):
    """Return the class that multiplies the experts."""
    monkeypatch.setattr(CPUKernels, "joins_experts", request.param == "joined")
    return JoinedExperts if request.param == "joined" else Experts


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("cls", [DeepseekV2Experts, Transposed, Ungated, Clamped])
def test_every_layout_gives_the_results_of_transformers(cls, activation, kind):
    model = layer_of(cls, hidden_act=activation)
    expected = model.experts(*inputs())
    experts.arrange(model)
    assert isinstance(model.experts.arranged, kind)
    assert not [*model.experts.parameters(recurse=False)], "the weights are in memory once"
    torch.testing.assert_close(model.experts(*inputs()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["by_sorting", "by_gathering", "by_all"])
def test_each_token_uses_its_own_experts_only(way):
    model = layer_of(DeepseekV2Experts)
    hidden, chosen, weights = inputs()
    expected = model.experts(hidden, chosen, weights)
    model.experts.down_proj[3] = torch.inf
    first, second = model.experts.gate_up_proj, model.experts.down_proj
    passed = getattr(joined_experts, way)(hidden, chosen, ExpertWeights(first, second, CPUKernels().swiglu))
    torch.testing.assert_close(joined_experts.weighted_sum(passed, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "way"), [(1, "by_gathering"), (2, "by_all"), (256, "by_all"), (257, "by_sorting")])
def test_the_cheapest_way_is_chosen_for_a_number_of_rows(rows, way, monkeypatch):
    taken = []
    for name in ("by_sorting", "by_gathering", "by_all"):
        monkeypatch.setattr(joined_experts, name, lambda *_, name=name: taken.append(name))
    layer = ExpertWeights(torch.zeros(12, 1), None, None)
    joined_experts.run(torch.zeros(rows, WIDTH), CHOSEN[:1].expand(rows, -1), layer)
    assert taken == [way]


def test_a_token_does_not_depend_on_the_rest_of_the_batch(kind):
    model = layer_of(DeepseekV2Experts)
    experts.arrange(model)
    hidden, chosen, weights = inputs()
    together = model.experts(hidden, chosen, weights)
    for row in range(len(hidden)):
        alone = model.experts(hidden[row : row + 1], chosen[row : row + 1], weights[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("repeats", [1, 60])
@pytest.mark.parametrize("joins", [False, True])
def test_the_sum_over_ranks_is_the_sum_over_all_experts(joins, repeats):
    model = layer_of(DeepseekV2Experts)
    hidden, chosen, weights = (one.repeat(repeats, 1) for one in inputs())
    expected = model.experts(hidden, chosen, weights)
    total = torch.zeros_like(expected)
    for start, stop in ((0, 4), (4, 11), (11, 12)):
        own = model.experts.gate_up_proj[start:stop], model.experts.down_proj[start:stop]
        if joins:
            rank = JoinedExperts(*own, CPUKernels().swiglu, start)
        else:
            rank = Experts((Expert.of(*both, CPUKernels().swiglu) for both in zip(*own, strict=True)), start)
        total += rank(hidden, chosen, weights)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_experts_with_biases_keep_transformers_implementation(kind):
    model = layer_of(GptOssExperts, swiglu_alpha=1.702, swiglu_limit=7.0)
    expected = model.experts(*inputs())
    experts.arrange(model)
    assert torch.equal(model.experts(*inputs()), expected)


def test_layers_of_our_own_are_joined_where_the_device_selects_experts(kind):
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = Experts(GatedMLP(WIDTH, INNER) for _ in range(EXPERTS)).requires_grad_(False)
    expected = model.experts(*inputs())
    experts.arrange(model)
    assert type(model.experts) is kind
    torch.testing.assert_close(model.experts(*inputs()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN is not used on this processor")
def test_onednn_multiplies_the_weights_of_each_expert_on_the_cpu(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_KERNELS", "onednn=yes")
    monkeypatch.setattr("mindie_mm.device.cpu.onednn_linear._LEAST_ELEMENTS", 1)
    model = layer_of(DeepseekV2Experts)
    expected = model.experts(*inputs())
    experts.arrange(model)
    use_onednn(model)
    assert sum(type(part) is OneDNNLinear for part in model.modules()) == 2 * EXPERTS
    torch.testing.assert_close(model.experts(*inputs()), expected, rtol=1e-4, atol=1e-4)
