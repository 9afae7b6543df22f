"""Tests of linear layers with int8 weights."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from mindie_mm import LLM, SamplingParams
from mindie_mm.device.base import Device
from mindie_mm.device.cpu import CPU
from mindie_mm.device.cpu.int8_linear import Int8Linear, has_int8, int8_linear
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig

pytestmark = pytest.mark.skipif(not has_int8(), reason="torch does not multiply int8 on this processor")

ENGINES = [name for name in ("fbgemm", "onednn") if name in torch.backends.quantized.supported_engines]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def linear(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(192, 80, bias=bias)


def rows(count: int = 6) -> Tensor:
    """Return rows whose magnitudes differ by many orders."""
    return torch.randn(count, 192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, count)[:, None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vnni", ["no", "yes"])
@torch.inference_mode()
def test_each_row_is_as_precise_as_8_bits_allow(
    engine: str, bias: bool, vnni: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vnni == "yes" and not torch.cpu._is_vnni_supported():
        pytest.skip("without VNNI, 8-bit activations overflow")
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"vnni={vnni}")
    plain = linear(bias=bias)
    off = (Int8Linear(plain, engine)(rows()) - plain(rows())).norm(dim=1) / plain(rows()).norm(dim=1)
    assert off.max() <= 0.03


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbors(engine: str) -> None:
    layer = Int8Linear(linear(), engine)
    together = layer(rows())
    alone = torch.cat([layer(row.unsqueeze(0)) for row in rows()])
    # Integers are exact, but oneDNN multiplies the scales in another order for one row.
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    assert torch.equal(together.view(2, 3, -1), layer(rows().view(2, 3, -1)))


@torch.inference_mode()
def test_non_finite_rows_stay_non_finite_and_do_not_spread(engine: str) -> None:
    plain = linear()
    layer, changed = Int8Linear(plain, engine), rows()
    changed[1] = torch.nan
    changed[2, 7] = torch.inf
    changed[3] = 0
    out = layer(changed)
    assert not out[1].isfinite().any()
    assert not out[2].isfinite().any()
    assert torch.equal(out[3], plain.bias)
    assert torch.equal(out[[0, 4, 5]], layer(rows())[[0, 4, 5]])


def test_making_a_layer_leaves_the_process_wide_engine_as_it_was() -> None:
    before = torch.backends.quantized.engine
    assert isinstance(int8_linear(linear()), Int8Linear)
    assert torch.backends.quantized.engine == before


@pytest.mark.skipif(len(ENGINES) < 2, reason="torch has only one library")
def test_a_trial_chooses_the_library_if_none_is_forced(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An attribute of the package has the same name as the module.
    module = sys.modules[Int8Linear.__module__]
    libraries: dict[int, str] = {}

    class Recorded(Int8Linear):
        def __init__(self, linear: nn.Linear, library: str) -> None:
            super().__init__(linear, library)
            libraries[id(self)] = library

    def seconds(layer: Int8Linear, _: Tensor) -> float:
        return 0.5 if libraries[id(layer)] == engine else 1.0

    monkeypatch.delenv("MINDIE_MM_KERNELS")
    monkeypatch.setattr(module, "_fastest_engine", module._fastest_engine.__wrapped__)  # its result is kept
    monkeypatch.setattr(module, "seconds", seconds)
    monkeypatch.setattr(module, "Int8Linear", Recorded)
    layer = int8_linear(linear())
    assert libraries[id(layer)] == engine


@torch.inference_mode()
def test_a_weight_of_zeros_gives_zeros(engine: str) -> None:
    plain = linear(bias=False)
    nn.init.zeros_(plain.weight)
    assert not Int8Linear(plain, engine)(rows()).any()


def test_a_dtype_other_than_float32_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.bfloat16\); use --dtype float32"):
        load_model(None, "cpu", "bfloat16", weights="int8")


def test_a_device_without_int8_is_named() -> None:
    with pytest.raises(DeviceError, match="not supported on the device cpu; leave the setting out"):
        Device.int8_linear(CPU(), linear())


def test_a_processor_without_int8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindie_mm.device.cpu.has_int8", lambda: False)
    with pytest.raises(DeviceError, match="does not support on this processor"):
        load_model(None, "cpu", weights="int8")


@pytest.mark.slow
def test_the_embedded_checkpoint_gives_the_same_greedy_answers() -> None:
    """The answers of a trained checkpoint have clear margins, which rounding does not close."""
    inputs = ["What can you do?", "Hello", [{"text": "Say something."}]]
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = {}
    for weights in ("auto", "int8"):
        with LLM(None, WorkerConfig(engine=EngineConfig(device="cpu", weights=weights))) as llm:  # type: ignore[arg-type]
            answers[weights] = [output.token_ids for output in llm.generate(inputs, params)]
            alone = [llm.generate([one], params)[0].token_ids for one in inputs]
        assert alone == answers[weights]
    assert answers["int8"] == answers["auto"]
