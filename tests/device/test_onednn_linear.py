"""Tests for linear layers that oneDNN multiplies, and the choice of these layers."""

import pytest
import torch
from torch import nn

from mindie_mm.device.cpu import CPU, onednn_linear
from mindie_mm.device.cpu.onednn_linear import OneDNNLinear, has_onednn, use_onednn
from mindie_mm.models import load_model
from tools.random_checkpoint import write_checkpoint

WIDTH = 512


pytestmark = pytest.mark.skipif(not has_onednn(), reason="oneDNN is not used on processors other than x86-64")


@pytest.fixture(autouse=True)
def always_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", "onednn=yes")


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
def test_a_replaced_layer_equals_the_plain_layer(given, bias):
    plain = nn.Linear(WIDTH, 300, bias=bias)
    with torch.inference_mode():
        torch.testing.assert_close(OneDNNLinear(plain)(given), plain(given), atol=1e-5, rtol=1e-5)
    assert (OneDNNLinear(plain).in_features, OneDNNLinear(plain).out_features) == (WIDTH, 300)


class _Special(nn.Linear):
    pass


def test_only_large_untouched_layers_in_float32_are_replaced():
    module = nn.ModuleDict(
        {
            "large": nn.Linear(WIDTH, WIDTH),
            "small": nn.Linear(8, 8),
            "rounded": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
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
    use_onednn(module)
    assert [name for name, layer in module.items() if isinstance(layer, OneDNNLinear)] == ["large", "tied"]
    assert module["tied"].weight is module["embedding"].weight


def test_a_model_gives_the_same_logits(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "small", "small")
    model = load_model(path, device="cpu")
    monkeypatch.setenv("MINDIE_MM_KERNELS", "onednn=no")
    plain = load_model(path, device="cpu")
    replaced = [name for name, layer in model.module.named_modules() if isinstance(layer, OneDNNLinear)]
    assert any("visual" in name for name in replaced)
    assert any("language_model" in name for name in replaced)
    ids = torch.arange(10, 60)
    torch.testing.assert_close(model.logits(ids), plain.logits(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("maker", "is_replaced"), [("vendor_id\t: GenuineIntel", False), ("vendor_id\t: AuthenticAMD", True), (None, False)]
)
def test_the_maker_of_the_processor_decides_if_no_choice_is_forced(maker, is_replaced, tmp_path, monkeypatch):
    monkeypatch.delenv("MINDIE_MM_KERNELS")
    if maker is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{maker}\n", encoding="utf-8")
    monkeypatch.setattr(onednn_linear, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(onednn_linear, "is_faster", onednn_linear.is_faster.__wrapped__)  # its result is kept
    module = nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH)})
    CPU().prepare(module)
    assert isinstance(module["layer"], OneDNNLinear) is is_replaced
