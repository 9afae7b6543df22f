"""Tests for layers that run fewer operators on the CPU than transformers' layers do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from mindie_mm.device import rotation
from mindie_mm.device.cpu import cpu_layers

T, HEADS, WIDTH = 7, 3, 16
TEXT = (1, HEADS, T, WIDTH), (1, T, WIDTH)
TOWER = (T, HEADS, WIDTH), (T, WIDTH)
NAMES = {rotation.TEXT: TEXT, rotation.TOWER: TOWER}


class Layer(nn.Module):
    """A layer whose Python module has Qwen2-VL's rotary function."""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    source = ModuleType("rotating")
    for name in NAMES:
        own = getattr(qwen2_vl, name)
        while isinstance(own, partial):  # an earlier test may already have replaced the function
            own = own.args[0]
        setattr(source, name, own)
    monkeypatch.setitem(sys.modules, "rotating", source)
    monkeypatch.setattr(Layer, "__module__", "rotating")
    return source


def values(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return queries, keys, cosines and sines. The two halves of the cosines and of the sines differ."""
    shape, angle_shape = NAMES[name]
    torch.manual_seed(0)
    return [torch.randn(each).to(dtype) for each in (shape, shape, angle_shape, angle_shape)]


@pytest.mark.parametrize("name", NAMES)
def test_rotations_equal_those_of_transformers(source: ModuleType, name: str) -> None:
    own, given = getattr(source, name), values(name)
    kept = [one.clone() for one in given]
    cpu_layers.lighten(Layer())
    assert getattr(source, name) is not own
    for one, other in zip(getattr(source, name)(*given), own(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, given, kept)), "the arguments are not changed"


def test_the_axis_of_heads_may_follow_the_axis_of_tokens(source: ModuleType) -> None:
    q, k, cos, sin = values(rotation.TEXT)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    own = source.apply_rotary_pos_emb
    cpu_layers.lighten(Layer())
    rotated = source.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for one, other in zip(rotated, own(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_are_rotated_as_before(source: ModuleType, name: str) -> None:
    own, given = getattr(source, name), values(name, torch.bfloat16)
    cpu_layers.lighten(Layer())
    assert all(map(torch.equal, getattr(source, name)(*given), own(*given)))


def test_nothing_is_wrapped_twice(source: ModuleType) -> None:
    cpu_layers.lighten(Layer())
    once = {name: getattr(source, name) for name in NAMES}
    cpu_layers.lighten(Layer())
    assert once == {name: getattr(source, name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_rotation_of_another_kind_is_kept(source: ModuleType, name: str) -> None:
    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings to pairs of neighboring numbers."""
        turned = [torch.stack([-one[..., 1::2], one[..., ::2]], -1).flatten(-2) for one in (q, k)]
        angles = (cos.unsqueeze(1), sin.unsqueeze(1))
        return q * angles[0] + turned[0] * angles[1], k * angles[0] + turned[1] * angles[1]

    def queries_alone(q: Tensor, freqs: Tensor) -> Tensor:
        """Apply rotary embeddings only to queries, as Qwen2.5-Omni's towers do."""
        return q * freqs

    for other in neighbours, queries_alone:
        setattr(source, name, other)
        cpu_layers.lighten(Layer())
        assert getattr(source, name) is other


def test_activations_equal_those_of_transformers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), QuickGELUActivation(), nn.GELU())
    given = torch.randn(5, 8)
    expected = model(given)
    cpu_layers.lighten(model)
    assert [type(part) for part in model] == [nn.Linear, cpu_layers.QuickGELU, nn.GELU]
    kept = given.clone()
    with torch.inference_mode():
        torch.testing.assert_close(model(given), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(given, kept)
