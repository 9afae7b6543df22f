"""Tests of linear layers with packed weights, and of the choice of the layers to pack."""

import pytest
import torch
from torch import nn

from mindie_mm.device.cpu import CPU, packed_linear
from mindie_mm.device.cpu.packed_linear import PackedLinear, can_pack, pack, seconds
from mindie_mm.models import load_model
from tools.random_checkpoint import write_checkpoint

WIDTH = 512


pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32), reason="layers are not packed on processors other than x86-64"
)


@pytest.fixture(autouse=True)
def always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", "packed=yes,step=no")


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        rows(7, WIDTH),
        rows(1, 3, WIDTH),
        rows(WIDTH),
        rows(0, WIDTH),
        rows(7, 2 * WIDTH)[:, ::2],
        rows(7, WIDTH + 3)[:, 3:],
        rows(WIDTH, 5).t(),
        rows(1, WIDTH).expand(4, WIDTH),
    ],
    ids=["rows", "batch", "vector", "none", "strided", "unaligned", "transposed", "expanded"],
)
def test_a_packed_layer_equals_the_plain_layer(given, bias):
    plain = nn.Linear(WIDTH, 300, bias=bias)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(given), plain(given), atol=1e-5, rtol=1e-5)


class _Special(nn.Linear):
    pass


def test_only_large_untouched_layers_are_packed():
    module = nn.ModuleDict(
        {
            "large": nn.Linear(WIDTH, WIDTH),
            "small": nn.Linear(8, 8),
            "float64": nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
            "special": _Special(WIDTH, WIDTH),
            "embedding": nn.Embedding(WIDTH, WIDTH),
            "tied": nn.Linear(WIDTH, WIDTH, bias=False),
            "moved": nn.Linear(WIDTH, WIDTH),
            "shared": nn.Linear(WIDTH, WIDTH),
        }
    )
    module["tied"].weight = module["embedding"].weight
    module["moved"].register_forward_pre_hook(lambda *_: None)
    module["shared"].forward = lambda rows: rows  # tensor parallelism also replaces `forward`
    pack(module)
    assert [name for name, layer in module.items() if isinstance(layer, PackedLinear)] == ["large"]


def test_a_model_with_packed_layers_gives_the_same_logits(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "small", "small")
    packed = load_model(path, device="cpu")
    monkeypatch.setenv("MINDIE_MM_KERNELS", "packed=no")
    plain = load_model(path, device="cpu")
    replaced = [name for name, layer in packed.module.named_modules() if isinstance(layer, PackedLinear)]
    assert any("visual" in name for name in replaced)
    assert any("language_model" in name for name in replaced)
    ids = torch.arange(10, 60)
    torch.testing.assert_close(packed.logits(ids), plain.logits(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed_s", [0.5, 2.0])
def test_a_trial_decides_if_no_choice_is_forced(packed_s, monkeypatch):
    monkeypatch.delenv("MINDIE_MM_KERNELS")
    monkeypatch.setattr(packed_linear, "pays", packed_linear.pays.__wrapped__)  # its result is kept for the process
    monkeypatch.setattr(
        packed_linear, "seconds", lambda layer, rows: packed_s if isinstance(layer, PackedLinear) else 1.0
    )
    module = nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH)})
    CPU().prepare(module)
    assert isinstance(module["layer"], PackedLinear) is (packed_s < 1)


def test_the_trial_runs_on_this_processor(monkeypatch):
    ran = []
    monkeypatch.setattr(packed_linear, "seconds", lambda *given: ran.append(type(given[0])) or seconds(*given))
    assert packed_linear.pays.__wrapped__(torch.float32) in (True, False)
    assert {nn.Linear, PackedLinear} <= {*ran}
