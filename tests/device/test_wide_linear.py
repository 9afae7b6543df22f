"""Tests for models of bfloat16 whose products are computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindie_mm.device.cpu import CPU, wide_linear
from mindie_mm.device.cpu.step_memory import allocated_peak_bytes
from mindie_mm.device.cpu.wide_linear import WideLinear, use_float32
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.models import load_model
from mindie_mm.nn.placement import Placement
from mindie_mm.settings.config import EngineConfig
from mindie_mm.tokenize import Tokenizer
from tests.conftest import KERNELS
from tests.media_samples import photograph

WIDTH = 96


@pytest.fixture(autouse=True)
def widens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},wide=yes")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 40, WIDTH), (0, WIDTH)], ids=["few", "batch", "none"])
def test_a_layer_multiplies_with_the_precision_of_float32(shape, bias, monkeypatch):
    monkeypatch.setattr(wide_linear, "CONVERTED", 7 * WIDTH)  # several blocks, the last of which is smaller
    plain = nn.Linear(WIDTH, 50, bias=bias, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = nn.functional.linear(rows(*shape).float(), plain.weight.float(), plain.bias.float() if bias else None)
        found = WideLinear(plain)(rows(*shape))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), atol=2**-9, rtol=2**-7)


def test_rows_in_float32_are_not_rounded():
    plain = nn.Linear(WIDTH, 50, dtype=torch.bfloat16)
    given = rows(3, WIDTH, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(WideLinear(plain)(given), plain.float()(given), atol=1e-5, rtol=1e-5)


def test_only_untouched_layers_in_bfloat16_are_replaced():
    module = nn.ModuleDict(
        {
            "plain": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
            "exact": nn.Linear(WIDTH, WIDTH),
            "moved": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        }
    )
    module["moved"].register_forward_pre_hook(lambda *_: None)
    use_float32(module)
    assert [name for name, layer in module.items() if isinstance(layer, WideLinear)] == ["plain"]


def test_a_long_prompt_is_computed_in_float32(random_checkpoint, tmp_path, monkeypatch):
    """Weights and the features of images are still rounded to bfloat16."""
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        items = [{"image": photograph(size=(70, 98))}, {"text": "What? " * 40}]
        ids = tokenizer.tokenize(items, tmp_path / "shm_name.txt")

        def logits(dtype: str, kernels: str) -> torch.Tensor:
            monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},{kernels}")
            return load_model(random_checkpoint, "cpu", dtype).logits(ids)

        exact = logits("float32", "wide=no")
        wide = (logits("bfloat16", "wide=yes") - exact).abs().mean()
        assert 0 < wide < 0.8 * (logits("bfloat16", "wide=no") - exact).abs().mean()


def test_a_tower_runs_in_float32_unless_a_setting_determines_its_precision(random_checkpoint):
    for bits, dtype in ((None, torch.float32), (32, torch.float32), (16, torch.bfloat16)):
        model = load_model(random_checkpoint, "cpu", "bfloat16", vision=Placement(bits=bits))
        assert model.module.model.visual.blocks[0].mlp.fc1.weight.dtype == dtype
        assert model.module.model.language_model.norm.weight.dtype == torch.bfloat16


def test_the_memory_of_float32_is_computed_also_if_there_are_adapters(random_checkpoint):
    """Steps with adapters compute in bfloat16, which takes less memory."""
    model = load_model(random_checkpoint, "cpu", "bfloat16")
    worst = WorstCase(model, model.processor, CPU(), EngineConfig(max_model_len=512))
    prefill = worst._prefill(511)
    assert allocated_peak_bytes(prefill) < CPU().peak_bytes(prefill)()
    (alone,) = (part.num_bytes for part in worst.step(()).parts if part.name.startswith("a prefill"))
    model.enable_loras(1, 1)
    (adapted,) = (part.num_bytes for part in worst.step(()).parts if part.name.startswith("a prefill"))
    assert adapted >= alone
