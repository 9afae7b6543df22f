"""Tests for linear layers with int8 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindie_mm import LLM, SamplingParams
from mindie_mm.device.base import Device
from mindie_mm.device.cpu import CPU, cpu_quantized
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.device.cpu.decode_step import MOST_ROWS
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig

ROWS = MOST_ROWS + 2
"""Number of rows, more than compiled code takes."""


@pytest.fixture(params=["few rows compiled", "torch"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that quantizes a layer, whose weight is converted in several blocks."""
    monkeypatch.setattr(cpu_quantized, "CONVERTED", 30 * 192)

    def of(plain: nn.Linear) -> CPUQuantizedLinear:
        layer = CPUQuantizedLinear.of(plain)
        if request.param != "torch":
            CPU().prepare(layer)
            if layer.few is None:
                pytest.skip("the package was installed without a C compiler")
        return layer

    return of


def linear(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(192, 80, bias=bias).requires_grad_(False)


def rows(count: int = ROWS) -> Tensor:
    """Return rows whose magnitudes differ by many orders."""
    return torch.randn(count, 192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, count)[:, None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, ROWS])
@torch.inference_mode()
def test_a_layer_multiplies_by_the_rounded_weight(make: Any, count: int, bias: bool) -> None:
    plain = linear(bias=bias)
    layer, given = make(plain), rows()[-count:]
    rounded = layer.values.double() * layer.scales.double()
    assert (rounded - plain.weight).abs().amax(1, keepdim=True).le(layer.scales / 2 * 1.0001).all()
    expected = nn.functional.linear(given.double(), rounded, plain.bias.double() if bias else None)
    size = expected.norm(dim=1, keepdim=True)
    assert ((layer(given) - expected) / size).abs().max() <= 1e-6
    plain.to(torch.bfloat16)
    layer = make(plain)
    assert layer(given.bfloat16()).dtype == torch.bfloat16
    assert ((layer(given.bfloat16()) - expected) / size).abs().max() <= 0.01


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbors(make: Any) -> None:
    layer = make(linear())
    together = layer(rows())
    alone = torch.cat([layer(row.unsqueeze(0)) for row in rows()])
    # Products sum in another order for one row.
    torch.testing.assert_close(together / rows().norm(dim=1)[:, None], alone / rows().norm(dim=1)[:, None])
    assert torch.equal(together.view(2, ROWS // 2, -1), layer(rows().view(2, ROWS // 2, -1)))


@torch.inference_mode()
def test_non_finite_rows_stay_non_finite_and_do_not_spread(make: Any) -> None:
    plain = linear()
    layer = make(plain)
    for count in (6, ROWS):
        changed = rows(count)
        changed[1] = torch.nan
        changed[2, 7] = torch.inf
        changed[3] = 0
        out = layer(changed)
        assert not out[1].isfinite().any()
        assert not out[2].isfinite().all()
        assert torch.equal(out[3], plain.bias)
        assert torch.equal(out[[0, 4, 5]], layer(rows(count))[[0, 4, 5]])


@torch.inference_mode()
def test_a_weight_of_zeros_gives_zeros(make: Any) -> None:
    plain = linear(bias=False)
    nn.init.zeros_(plain.weight)
    assert not make(plain)(rows()).any()


def test_float16_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.float16\); use --dtype float32 or bfloat16"):
        load_model(None, "cpu", "float16", weights="int8")


def test_a_device_without_int8_is_named() -> None:
    with pytest.raises(DeviceError, match="not supported on the device cpu; leave the setting out"):
        Device.int8_linear(CPU(), linear())


@pytest.mark.slow
def test_the_embedded_checkpoint_gives_the_same_greedy_answers() -> None:
    """The answers of a trained checkpoint have clear margins, which rounding does not close."""
    inputs = ["What can you do?", "Hello", [{"text": "Say something."}]]
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = {}
    for weights in ("auto", "int8"):
        with LLM(None, WorkerConfig(engine=EngineConfig(device="cpu", weights=weights))) as llm:  # type: ignore[arg-type]
            answers[weights] = [output.token_ids for output in llm.generate(inputs, params)]
    assert answers["int8"] == answers["auto"]
