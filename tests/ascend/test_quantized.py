"""Tests for layers with 8-bit weights and inputs on the simulated NPU, and the operators that compute them."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch

from tests.ascend.processes import call
from tests.ascend.test_kernels import Recorder, with_log_lines

TOLERANCE = 0.05


def test_rounded_rows_and_their_sums_are_exact(npu):
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = torch.randint(-128, 128, (24, 96), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    rounded, scales = torch.ops.npu.npu_dynamic_quant(rows.to(npu))
    exact = rows.float().numpy()
    steps = np.abs(exact).max(1) / np.float32(127)
    assert np.array_equal(scales.cpu().numpy(), steps)
    assert np.array_equal(rounded.cpu().numpy(), np.rint(exact / steps[:, None]))
    out = torch.ops.npu.npu_quant_matmul(
        rounded,
        values.T.to(npu),
        torch.ones(24).to(npu),
        bias=torch.full((24,), 7, dtype=torch.int32).to(npu),
        output_dtype=torch.bfloat16,
    )
    sums = rounded.cpu().numpy().astype(np.int64) @ values.numpy().astype(np.int64).T + 7
    assert torch.equal(out.cpu(), torch.from_numpy(sums).float().bfloat16())


def test_halves_are_rounded_to_even_and_large_values_saturate(npu):
    rows = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 1000.0, -1000.0, 3.0]])
    ones, zeros = torch.ones(8).to(npu), torch.zeros(8).to(npu)
    found = torch.ops.npu.npu_quantize(rows.to(npu), ones, zeros, torch.qint8, -1, False)
    assert found.cpu().tolist() == [[0, 2, 2, 0, -2, 127, -128, 3]]


def test_scales_of_64_bits_hold_a_float_in_their_low_half(npu):
    scale = torch.tensor([0.25, 2.0])
    wide = torch.from_numpy(scale.numpy().view(np.uint32).astype(np.int64))
    given = torch.tensor([[2, 3]], dtype=torch.int8).to(npu), torch.eye(2).to(torch.int8).to(npu), wide.to(npu)
    assert torch.ops.npu.npu_quant_matmul(*given, output_dtype=torch.float16).cpu().tolist() == [[0.5, 6.0]]


def multiplied(dtype: str) -> dict:
    """Run layers on CPU and NPU. Return the operators and the difference."""
    import torch_npu  # noqa: F401

    from mindie_mm.device import QuantizedLinear, open_device
    from tests.models.test_modelslim import random_weight

    found, names, worst = open_device("npu"), [], 0.0
    for is_static in (False, True):
        weight = random_weight(24, 96, is_static)
        bias = None if is_static else torch.nn.Parameter(torch.randn(24), requires_grad=False)
        on_host = QuantizedLinear(weight, bias)
        on_device = None if bias is None else torch.nn.Parameter(bias.to("npu", getattr(torch, dtype)))
        layer = found.quantized_linear(weight, on_device)
        for count in (1, 2, 33):
            rows = torch.randn(1, count, 96).to(getattr(torch, dtype))
            with torch.inference_mode():
                layer(rows.to("npu"))  # the first call tries operators
                with Recorder() as recorder:
                    out = layer(rows.to("npu"))
                expected = on_host(rows.float())
            names.append([name for name in recorder.names if name.startswith("npu_") and "cast" not in name])
            worst = max(worst, ((out.float().cpu() - expected).abs().max() / expected.abs().max()).item())
    return {"names": names, "worst": worst}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_operators_give_the_results_of_plain_torch(dtype):
    found = call(multiplied, dtype)
    dynamic, static = ["npu_dynamic_quant", "npu_quant_matmul"], ["npu_quantize", "npu_quant_matmul"]
    assert found["names"] == [dynamic] * 3 + [static] * 3
    assert found["worst"] < TOLERANCE


def test_plain_torch_computes_in_float32():
    found = call(multiplied, "float32")
    assert found["names"] == [[]] * 6
    assert found["worst"] < 1e-4


@pytest.mark.parametrize("settings", [{"missing": "npu_quant_matmul"}, {"wrong": "npu_quant_matmul:undefined row"}])
def test_a_missing_or_wrong_operator_is_logged_and_replaced_by_plain_torch(settings):
    found, lines = call(with_log_lines, multiplied, "bfloat16", **settings)
    assert found["worst"] < TOLERANCE
    words = "does not run" if "missing" in settings else "gives wrong"
    assert [line.partition(" (")[0] for line in lines] == ["npu_quant_matmul"] * 2, lines
    assert all(words in line for line in lines)


def served(path: str, dtype: str, is_joined: bool) -> list:
    """Return the logits of a checkpoint on the NPU, and the operators that multiply integers."""
    import torch_npu  # noqa: F401

    from mindie_mm.models import load_model
    from mindie_mm.nn.decoder_layer import DecoderLayer

    model = load_model(path, device="npu", dtype=dtype)
    model.logits(torch.arange(10, 40))  # also runs the trials of the operators
    with Recorder() as recorder:
        logits = model.logits(torch.arange(10, 40))
    assert all(isinstance(layer, DecoderLayer) for layer in model.text_model.layers) is is_joined
    return [logits.cpu(), [name for name in recorder.names if "quant" in name]]


def test_a_checkpoint_of_modelslim_is_served(random_checkpoint, tmp_path):
    from mindie_mm.models import load_model
    from tests.models.modelslim import quantize
    from tests.models.test_modelslim import TEXT, in_turn

    folder = shutil.copytree(random_checkpoint, tmp_path / "packed")
    quantize(folder, in_turn(TEXT, "W8A8", "W8A8_DYNAMIC", "W8A16", "W4A8_DYNAMIC"), wide_scales=True)
    logits, names = call(served, str(folder), "bfloat16", False)
    assert {*names} == {"npu_dynamic_quant", "npu_quant_matmul", "npu_quantize"}
    expected = load_model(folder, device="cpu").logits(torch.arange(10, 40))
    assert (logits - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize(("kind", "rounding"), [("W8A8", "npu_quantize"), ("W8A8_DYNAMIC", "npu_dynamic_quant")])
def test_layers_with_the_same_input_round_it_once(kind, rounding, random_checkpoint, tmp_path):
    from mindie_mm.models import load_model
    from tests.models.modelslim import quantize
    from tests.models.test_modelslim import TEXT, in_turn

    folder = shutil.copytree(random_checkpoint, tmp_path / "packed")
    quantize(folder, in_turn(TEXT, kind), wide_scales=True)
    logits, names = call(served, str(folder), "bfloat16", True)
    assert names == [rounding, "npu_quant_matmul"] * 4 * 2, "four products in each of two layers"
    ids = torch.arange(10, 40)
    exact, rounded = (load_model(folder, device="cpu", dtype=dtype).logits(ids) for dtype in ("float32", "bfloat16"))
    assert (logits - exact).norm() <= 1.2 * (rounded - exact).norm()


def with_experts(path: str) -> list:
    """Return the logits of a checkpoint on the NPU, the operators of experts, and the dtypes of their weights."""
    import torch_npu  # noqa: F401

    from mindie_mm.models import load_model
    from mindie_mm.nn.experts import JoinedExperts

    model = load_model(path, device="npu", dtype="bfloat16")
    model.logits(torch.arange(10, 40))  # also runs the trials of the operators
    with Recorder() as recorder:
        logits = model.logits(torch.arange(10, 40))
    layers = [part for part in model.module.modules() if isinstance(part, JoinedExperts)]
    dtypes = [str(weight.dtype) for layer in layers for weight in layer.parameters()]
    return [
        logits.cpu(),
        [name for name in recorder.names if name in ("npu_grouped_matmul", "npu_dynamic_quant")],
        dtypes,
    ]


@pytest.mark.parametrize("partly", [False, True])
def test_the_experts_of_a_checkpoint_of_modelslim_stay_in_8_bits(partly, tmp_path):
    """If an expert of a layer is not quantized, all experts of the layer are dequantized."""
    from mindie_mm.models import load_model
    from tests.models.modelslim import quantize
    from tests.models.test_qwen3_vl_moe import TestQwen3VLMoe, separate_experts

    TestQwen3VLMoe.write_checkpoint(tmp_path)
    folder = separate_experts(tmp_path, tmp_path / "packed")

    def kind_of(name: str, weight: torch.Tensor) -> str | None:
        is_plain = partly and "layers.0" in name and "experts.1." in name
        return "W8A8_DYNAMIC" if ".experts." in name and not is_plain else None

    quantize(folder, kind_of)
    logits, names, dtypes = call(with_experts, str(folder))
    layers = len(dtypes) // 2
    assert layers > 1
    assert dtypes == ["torch.bfloat16"] * 2 * partly + ["torch.int8"] * 2 * (layers - partly)
    assert names == ["npu_grouped_matmul"] * 2 * partly + ["npu_dynamic_quant", "npu_grouped_matmul"] * 2 * (
        layers - partly
    )
    expected = load_model(folder, device="cpu").logits(torch.arange(10, 40))
    assert (logits - expected).norm() <= 0.05 * expected.norm()


def test_experts_of_layers_of_our_own_stay_in_8_bits(tmp_path):
    from mindie_mm.models import load_model
    from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
    from tests.models.modelslim import quantize

    golden = GOLDEN / "deepseek_vl2" / "latent"
    write_checkpoint(golden, tmp_path, drawn_weights(golden))
    quantize(tmp_path, lambda name, _: "W8A8_DYNAMIC" if ".mlp.experts." in name else None)
    logits, names, dtypes = call(with_experts, str(tmp_path))
    assert {*dtypes} == {"torch.int8"}
    assert names == ["npu_dynamic_quant", "npu_grouped_matmul"] * len(dtypes)
    ids = torch.arange(10, 40)
    exact, rounded = (load_model(tmp_path, device="cpu", dtype=dtype).logits(ids) for dtype in ("float32", "bfloat16"))
    assert (logits - exact).norm() <= 1.2 * (rounded - exact).norm()


def refusals(folders: list[str]) -> list[str]:
    """Return the messages with which checkpoints are refused."""
    import torch_npu  # noqa: F401

    from mindie_mm.errors import UnsupportedCheckpoint
    from mindie_mm.models import load_model

    messages = []
    for folder in folders:
        with pytest.raises(UnsupportedCheckpoint) as refused:
            load_model(folder, device="npu", dtype="bfloat16")
        messages.append(str(refused.value))
    return messages


def test_experts_that_do_not_fit_the_model_are_refused_as_on_other_devices(tmp_path):
    """Transformers compares the shapes of dequantized experts with the model's."""
    from safetensors.torch import load_file, save_file

    from mindie_mm.errors import UnsupportedCheckpoint
    from mindie_mm.models import load_model
    from tests.models.modelslim import quantize
    from tests.models.test_qwen3_vl_moe import TestQwen3VLMoe, separate_experts

    def narrower(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, :-8] if "down_proj" in name else weight[:-8]

    TestQwen3VLMoe.write_checkpoint(tmp_path)
    folders = []
    for numbers in (r"\d+", "1"):  # all experts, or one of them
        folder = separate_experts(tmp_path, tmp_path / f"packed {len(folders)}")
        weights = load_file(folder / "model.safetensors")
        for name in [name for name in weights if re.search(rf"\.experts\.{numbers}\.", name)]:
            weights[name] = narrower(name, weights[name]).contiguous()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        quantize(folder, lambda name, _: "W8A8_DYNAMIC" if ".experts." in name else None)
        folders.append(str(folder))
    for folder, message in zip(folders, call(refusals, folders), strict=True):
        with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)):
            load_model(folder, device="cpu", dtype="bfloat16")
