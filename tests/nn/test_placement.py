"""Tests for a tower and a projector that have their own device or precision."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mindie_mm.device import CPU, KINDS
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import load_model
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.placement import Placement, place
from mindie_mm.nn.traits import Traits
from mindie_mm.settings.config import EngineConfig
from mindie_mm.tokenize import Tokenizer
from tests.conftest import KERNELS
from tests.media_samples import photograph

DTYPES = {16: torch.bfloat16, 32: torch.float32, None: torch.float32}


@pytest.fixture
def ids(random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield tokenizer.tokenize([{"image": photograph(size=(70, 98))}, {"text": "What?"}], tmp_path / "shm_name.txt")


@pytest.mark.parametrize("vision", [None, 16, 32])
@pytest.mark.parametrize("projector", [None, 16, 32])
def test_parts_can_have_their_own_precision(random_checkpoint, ids, vision, projector):
    plain = load_model(random_checkpoint, device="cpu", dtype="float32")
    moved = load_model(
        random_checkpoint,
        device="cpu",
        dtype="float32",
        vision=Placement("cpu", vision),
        projector=Placement("cpu", projector),
    )
    tower = moved.module.model.visual
    assert tower.blocks[0].mlp.fc1.weight.dtype == DTYPES[vision]
    # The projector is part of the tower, but its own placement, which sets a device here, is applied last.
    assert tower.merger.mlp[0].weight.dtype == DTYPES[projector]
    assert moved.module.lm_head.weight.dtype == torch.float32
    difference = (moved.logits(ids) - plain.logits(ids)).abs().max()
    halved = 16 in (vision, projector)
    assert 0 < difference < 0.05 if halved else difference == 0


def test_a_32_bit_tower_is_more_exact_in_a_16_bit_model(random_checkpoint, ids):
    def features(dtype, bits=None):
        model = load_model(random_checkpoint, device="cpu", dtype=dtype, vision=Placement(bits=bits))
        (found,) = model.encode(model.read(ids.numpy()))
        assert found.dtype == getattr(torch, dtype)
        return found.float()

    exact = features("float32")
    assert (features("bfloat16", 32) - exact).abs().mean() < 0.7 * (features("bfloat16") - exact).abs().mean()
    assert torch.equal(features("bfloat16", 16), features("bfloat16"))


@pytest.mark.parametrize("name", ["vision", "projector"])
@pytest.mark.parametrize("bits", [4, 8, 0, 64])
def test_other_precisions_are_refused(name, bits):
    with pytest.raises(InputError, match=f"{name}_bits={bits} must be 16 or 32"):
        EngineConfig(**{f"{name}_bits": bits})


def test_a_missing_device_is_refused(random_checkpoint):
    absent = [kind.name for kind in KINDS if kind.missing()]
    for device in absent:
        with pytest.raises(DeviceError, match=f"the device {device} cannot be used"):
            load_model(random_checkpoint, device="cpu", vision=Placement(device))
    with pytest.raises(InputError, match="device='tpu'"):
        load_model(random_checkpoint, device="cpu", projector=Placement("tpu"))


class Bare:
    """A model that consists of the given parts, which may include a tower."""

    def __init__(self, **parts: nn.Module) -> None:
        self.module = nn.ModuleDict(parts)
        self.traits = Traits(vision_parts=tuple(name for name in parts if name == "visual"))
        self.spec = ModelSpec(8, 8, 8, (), (), torch.device("cpu"), torch.float32)


def test_a_model_without_the_part_is_refused():
    with pytest.raises(InputError, match=re.escape("vision_device or vision_bits is set, but this model has no")):
        place(Bare(text=nn.Linear(2, 2)), Placement(bits=16), Placement())


def test_another_precision_for_a_quantized_part_is_refused():
    packed = nn.Linear(2, 2)
    packed.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InputError, match="quantized"):
        place(Bare(visual=packed), Placement(bits=16), Placement())


def test_a_quantized_part_without_plain_weights_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},wide=yes")
    part = CPU().int8_linear(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    place(Bare(visual=part), Placement(), Placement())
    assert not part._forward_hooks
