"""Tests that a model computes the same with every choice between kernels, on any processor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mindie_mm.device import choices
from mindie_mm.device.cpu import cpu_attention
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.device.cpu.onednn_linear import OneDNNLinear, has_onednn
from mindie_mm.device.cpu.wide_linear import WideLinear
from mindie_mm.errors import InputError
from mindie_mm.media.image.encoded_image import resize
from mindie_mm.models import load_model
from mindie_mm.nn.decoder_layer import FewOperatorLayer
from tests.conftest import KERNELS
from tools.random_checkpoint import write_checkpoint

IDS = torch.arange(10, 60)
NO_YES = ("no", "yes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("choices") / "small", "small")


def kinds(module: nn.Module) -> set[type[nn.Module]]:
    return {type(part) for part in module.modules()}


def logits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, **settings: Any
) -> tuple[Tensor, nn.Module]:
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},{kernels}")
    model = load_model(checkpoint, device="cpu", **settings)
    return model.logits(IDS).float(), model.module


def yes_and_no(*names: str) -> list[str]:
    products = itertools.product(NO_YES, repeat=len(names))
    return [",".join(f"{name}={value}" for name, value in zip(names, values, strict=True)) for values in products]


def test_the_tests_force_every_choice() -> None:
    forced = dict(part.split("=") for part in os.environ["MINDIE_MM_KERNELS"].split(","))
    assert forced.keys() == choices.CHOICES.keys()


@pytest.mark.parametrize("kernels", yes_and_no("onednn", "fused"))
def test_logits_in_float32_do_not_depend_on_the_choices(
    checkpoint: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = logits(checkpoint, monkeypatch, "onednn=no,fused=no")
    actual, module = logits(checkpoint, monkeypatch, kernels)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert (OneDNNLinear in kinds(module)) is ("onednn=yes" in kernels and has_onednn())
    assert (FewOperatorLayer in kinds(module)) is ("fused=yes" in kernels)


@pytest.mark.parametrize("kernels", yes_and_no("onednn", "fused", "blocks", "wide"))
def test_logits_in_bfloat16_do_not_depend_on_the_choices(
    checkpoint: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = logits(checkpoint, monkeypatch, "onednn=no,fused=no")
    actual, module = logits(checkpoint, monkeypatch, kernels, dtype="bfloat16")
    assert (actual - expected).norm() <= 0.03 * expected.norm()
    assert OneDNNLinear not in kinds(module) or "wide=yes" in kernels  # towers then run in float32
    assert (WideLinear in kinds(module)) is ("wide=yes" in kernels)
    used: Any = module.config
    assert (used.vision_config._attn_implementation == cpu_attention.NAME) is ("blocks=yes,wide=no" in kernels)


@pytest.mark.parametrize("kernels", yes_and_no("onednn", "fused", "wide"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_in_int8_do_not_depend_on_the_choices(
    checkpoint: Path, kernels: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = logits(checkpoint, monkeypatch, "")
    expected, _ = logits(checkpoint, monkeypatch, "", weights="int8")
    assert 0 < (expected - plain).norm() <= 0.03 * plain.norm()
    actual, module = logits(checkpoint, monkeypatch, kernels, dtype=dtype, weights="int8")
    assert CPUQuantizedLinear in kinds(module)
    assert (actual - expected).norm() <= (1e-5 if dtype == "float32" else 0.03) * expected.norm()


LEVELS = """
import sys
import numpy as np
import torch
from PIL import Image
from mindie_mm.media.image.encoded_image import resize
from mindie_mm.models import load_model

for dtype in ("float32", "bfloat16"):
    torch.save(load_model(sys.argv[1], "cpu", dtype).logits(torch.arange(10, 60)).float(), f"{sys.argv[2]}.{dtype}")
pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
np.save(sys.argv[2], resize(pixels, 33, 47))
"""


@pytest.mark.parametrize("level", ["default", pytest.param("avx2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_results_do_not_depend_on_the_simd_level(
    checkpoint: Path, tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch and oneDNN read the variables when they are loaded. A processor that lacks a level uses a lower one."""
    expected, _ = logits(checkpoint, monkeypatch, "onednn=yes")
    isa = {"default": "SSE41", "avx2": "AVX2"}[level]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": level, "ONEDNN_MAX_CPU_ISA": isa, "MKL_CBWR": "COMPATIBLE"}
    subprocess.run([sys.executable, "-c", LEVELS, checkpoint, tmp_path / "out"], env=environment, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "out.float32"), expected, atol=1e-4, rtol=0)
    rounded = torch.load(tmp_path / "out.bfloat16")
    assert (rounded - expected).norm() <= 0.03 * expected.norm()
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    assert np.array_equal(np.load(tmp_path / "out.npy"), resize(pixels, 33, 47))


@pytest.mark.parametrize("kernels", ["onednn", "onednn=maybe", "simd=avx2", "step=sse"])
def test_an_unknown_choice_is_refused(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", kernels)
    with pytest.raises(InputError, match=r"must be a comma-separated list of onednn=no\|yes"):
        choices.forced("onednn")
