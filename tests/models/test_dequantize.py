"""Tests for FP8 checkpoints, against a checkpoint of the dequantized weights, and for formats that are refused."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.integrations.finegrained_fp8 import FP8Linear

from mindie_mm.device import QuantizedLinear
from mindie_mm.device.cpu import CPU
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.formats import format_of
from mindie_mm.nn.weights.formats.float8 import Float8Weight
from mindie_mm.nn.weights.formats.packed import block_of
from mindie_mm.nn.weights.quantized import check_quantization, is_quantized, quantization, try_layers
from mindie_mm.nn.weights.stored_tensors import check_scaled
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.small_checkpoints import changed

IDS = torch.arange(10, 40)
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual"],
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:visual.*"],
}
"""A quantization_config as llm-compressor writes it."""


def compressed(**changes):
    settings = json.loads(json.dumps(W8A8))
    settings["config_groups"]["group_0"]["weights"] |= changes.pop("weights", {})
    return {**settings, **changes}


FP8_CHANNEL = compressed(format="float-quantized", weights={"type": "float"})
FP8_TENSOR = compressed(format="naive-quantized", weights={"type": "float", "strategy": "tensor"})
FP8_BLOCK = compressed(
    format="float-quantized", weights={"type": "float", "strategy": "block", "block_structure": [128, 128]}
)
CASES = {
    "blocks": (FP8, (128, 128), "_scale_inv", torch.float8_e4m3fn),
    "one scale": ({**FP8, "weight_block_size": None}, None, "_scale_inv", torch.float8_e4m3fn),
    "rows": ({"quant_method": "fbgemm_fp8"}, (1, 0), "_scale", torch.float8_e4m3fn),
    "fp8 rows": (FP8_CHANNEL, (1, 0), "_scale", torch.float8_e4m3fn),
    "fp8 tensor": (FP8_TENSOR, None, "_scale", torch.float8_e4m3fn),
    "fp8 blocks": (FP8_BLOCK, (128, 128), "_scale", torch.float8_e4m3fn),
}
"""By name: quantization_config, (rows, columns) of a block, the suffix of the scales' names, and the dtype.

A size of 0 means the whole row. Without a block size, one scale applies to the whole weight.
"""


def rounded(weight, block, dtype):
    """Quantize a weight [rows, columns]. Return the quantized numbers and their scales."""
    rows, columns = weight.shape
    down, across = block or (rows, columns)
    across = across or columns
    scales = torch.empty(math.ceil(rows / down), math.ceil(columns / across))
    numbers = torch.empty(rows, columns, dtype=dtype)
    largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        part = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
        scales[i, j] = weight[part].abs().max() / largest
        exact = weight[part] / scales[i, j]
        numbers[part] = (exact.round() if dtype == torch.int8 else exact).to(dtype)
    return numbers, scales.reshape(()) if block is None else scales


def quantise(folder, case, pattern, stored=torch.float32):
    """Quantize the checkpoint `folder` in place, and return its dequantized weights.

    Scales and weights that are not quantized are saved as `stored`.
    """
    settings, block, suffix, dtype = case
    packed, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if re.fullmatch(pattern, name):
            numbers, scales = rounded(weight, block, dtype)
            packed[name], packed[f"{name}{suffix}"] = numbers, scales.to(stored)
            spread = scales.to(stored).float()
            if block is not None:
                down, across = block[0], block[1] or weight.shape[1]
                spread = spread.repeat_interleave(down, 0)[: weight.shape[0]]
                spread = spread.repeat_interleave(across, 1)[:, : weight.shape[1]]
            plain[name] = numbers.float() * spread
        else:
            packed[name] = weight.to(stored)
            plain[name] = packed[name].float()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    assert len(packed) > len(plain)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return plain


LINEAR = r"model\.layers\..*_proj\.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def odd_checkpoint(random_checkpoint, tmp_path_factory):
    """Return the random checkpoint with layers whose sizes, 160 and 200, are not multiples of 128."""
    folder = changed(random_checkpoint, tmp_path_factory.mktemp("odd") / "odd", "config", {})
    config = Qwen2VLConfig.from_pretrained(random_checkpoint)
    config.text_config.hidden_size, config.text_config.intermediate_size = 160, 200
    config.vision_config.hidden_size = 160
    config.text_config.rope_parameters["mrope_section"] = [4, 8, 8]
    torch.manual_seed(0)
    (folder / "model.safetensors").unlink()
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def plain_copy(source, folder, weights):
    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def packed_numbers(folder):
    weights = load_file(folder / "model.safetensors").values()
    return sum(weight.numel() for weight in weights if weight.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_plain_numbers(case, odd_checkpoint, tmp_path, caplog):
    shutil.copytree(odd_checkpoint, tmp_path / "packed")
    # Published checkpoints store unquantized weights and the scales of FP8 weights in bfloat16.
    weights = quantise(tmp_path / "packed", CASES[case], LINEAR, torch.bfloat16)
    plain = plain_copy(odd_checkpoint, tmp_path / "plain", weights)
    with caplog.at_level(logging.WARNING):
        found = load_model(tmp_path / "packed", device="cpu")
    # Blocks of 128 are whole groups of the 160 inputs, but not of the 200 inputs of down_proj.
    cut = 2 if 128 in (CASES[case][1] or ()) else 0
    kept = [layer for layer in found.module.modules() if isinstance(layer, QuantizedLinear)]
    assert sum(layer.values.numel() for layer in kept) == packed_numbers(tmp_path / "packed") - cut * 160 * 200
    assert {layer.values.dtype for layer in kept} == {torch.float8_e4m3fn}
    assert (f"{cut} linear layers are dequantized" in caplog.text) == (cut > 0)
    assert {weight.dtype for weight in found.module.parameters()} == {torch.float32}
    assert (found.logits(IDS) - load_model(plain, device="cpu").logits(IDS)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_any_dtype_of_the_model_and_of_the_scales_is_served(dtype, stored, odd_checkpoint, tmp_path):
    shutil.copytree(odd_checkpoint, tmp_path / "packed")
    weights = quantise(tmp_path / "packed", CASES["blocks"], LINEAR, stored)
    plain = plain_copy(odd_checkpoint, tmp_path / "plain", weights)
    exact = load_model(plain, device="cpu").logits(IDS)
    models = (load_model(path, device="cpu", dtype=dtype) for path in (tmp_path / "packed", plain))
    ours, theirs = ((model.logits(IDS) - exact).norm() for model in models)
    assert ours <= 1.1 * theirs


def test_families_with_their_own_layers_are_dequantized_too(tmp_path):
    for name in ("packed", "plain"):
        (tmp_path / name).mkdir()
        write_checkpoint(
            GOLDEN / "deepseek_vl2" / "latent", tmp_path / name, drawn_weights(GOLDEN / "deepseek_vl2" / "latent")
        )
    weights = quantise(tmp_path / "packed", CASES["blocks"], r"language\.model\.layers\..*_proj.*\.weight")
    save_file(weights, tmp_path / "plain" / "model.safetensors")
    found, expected = (load_model(tmp_path / name, device="cpu").logits(IDS) for name in ("packed", "plain"))
    assert (found - expected).abs().max() <= 1e-4


def test_uint8_scales_are_exponents():
    scales = torch.tensor([[127, 128], [126, 127]], dtype=torch.uint8)
    weight = Float8Weight(torch.ones(2, 3).to(torch.float8_e4m3fn), scales, (1, 2))
    assert weight.dequantized().tolist() == [[1, 1, 2], [0.5, 0.5, 1]]


@pytest.mark.parametrize("size", [[128], [], [0, 128], [-128, 128], [128, 128, 128], "128", 128, ["a", "b"], [None, 1]])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_blocks_without_two_positive_sizes_are_refused_from_the_settings(method, size, random_checkpoint):
    """`mindie-mm doctor` judges the settings alone."""
    group = {"weights": {"type": "float", "num_bits": 8, "block_structure": size or "none"}}
    stated = {"weight_block_size": size, "config_groups": {"all": group}, "format": "float-quantized"}
    own = Checkpoint.open(random_checkpoint)
    settings = {"quantization_config": {"quant_method": method, **stated}}
    with pytest.raises(UnsupportedCheckpoint, match="must be two positive integers"):
        format_of(replace(own, config={**own.config, **settings}))


def test_blocks_of_older_releases_are_read():
    assert block_of("16x32") == block_of([16, 32]) == (16, 32)


@pytest.mark.parametrize(
    ("spoiled", "scale"),
    [
        (torch.nan, 1.0),  # compiled code reads 480
        (1.0, 256.0),  # overflows in compiled code
    ],
)
def test_weights_that_compiled_code_cannot_read_are_dequantized(spoiled, scale):
    numbers = torch.ones(4, 128)
    numbers[2, 7] = spoiled
    weight = Float8Weight(numbers.to(torch.float8_e4m3fn), torch.tensor(scale), None)
    assert not weight.stays_packed(CPU())
    assert weight.dequantized().equal(numbers * scale) or weight.dequantized()[2, 7].isnan()
    assert Float8Weight(torch.ones(4, 128).to(torch.float8_e4m3fn), torch.tensor(1.0), None).stays_packed(CPU())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, name: weights.pop(f"{name}_scale_inv"), "is stored as float8_e4m3fn"),
        (lambda weights, name: weights.update({f"{name}_scale_inv": torch.ones(3, 2)}), "the shape must be [2, 2]"),
        (lambda weights, name: weights.pop(name), "which the quantized weight"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(change, message, odd_checkpoint, tmp_path):
    shutil.copytree(odd_checkpoint, tmp_path / "packed")
    quantise(tmp_path / "packed", CASES["blocks"], LINEAR)
    weights = load_file(tmp_path / "packed" / "model.safetensors")
    change(weights, GATE)
    save_file(weights, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=re.escape("layers.0.mlp.gate_proj.weight")) as error:
        load_model(tmp_path / "packed", device="cpu")
    assert message in str(error.value)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("ending", ["gate_proj.weight", "q_proj.bias", "norm1.bias"])
def test_quantized_weights_without_scales_are_refused(odd_checkpoint, tmp_path, ending, dtype, file):
    shutil.copytree(odd_checkpoint, tmp_path / "packed")
    stored = tmp_path / "packed" / "model.safetensors"
    weights = load_file(stored)
    name = min(name for name in weights if name.endswith(ending))
    weights[name] = (weights[name] * 100).to(dtype)
    stored.unlink()
    if file == stored.name:
        save_file(weights, stored, {"format": "pt"})
    else:
        torch.save(weights, tmp_path / "packed" / file)
    with pytest.raises(UnsupportedCheckpoint, match=f"{name} is stored as {str(dtype).removeprefix('torch.')}"):
        load_model(tmp_path / "packed", device="cpu")


def test_8_bit_weights_of_any_name_need_scales():
    checkpoint = Checkpoint(Path("folder"), {})
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(UnsupportedCheckpoint, match="image_projection is stored as"):
            check_scaled(checkpoint, "image_projection", dtype)
    for dtype in (torch.int64, torch.bool, torch.float16, torch.float64, None):
        check_scaled(checkpoint, "vision_tower.position_ids", dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e5m2])
def test_quantized_weights_without_scales_are_refused_by_families_with_their_own_layers(tmp_path, dtype):
    weights = dict(drawn_weights(GOLDEN / "molmo" / "d"))
    name = next(name for name in weights if name.endswith("class_embedding"))
    weights[name] = (weights[name] * 100).to(dtype)
    write_checkpoint(GOLDEN / "molmo" / "d", tmp_path, weights)
    with pytest.raises(UnsupportedCheckpoint, match=f"{name} is stored as {str(dtype).removeprefix('torch.')}"):
        load_model(tmp_path, device="cpu")


GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True, "model_name_or_path": None}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("quantize_config.json", GPTQ, "states the quantization 'gptq', but none"),
        ("quant_config.json", AWQ, "states the quantization 'awq', but none"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8"}},
            "quantized with 'modelopt', which transformers.*Alternatively, use the unquantized checkpoint",
        ),
    ],
)
def test_a_quantisation_file_beside_config_json_is_read(file, settings, message, odd_checkpoint, tmp_path):
    shutil.copytree(odd_checkpoint, tmp_path / "packed")
    (tmp_path / "packed" / file).write_text(json.dumps(settings))
    with pytest.raises(UnsupportedCheckpoint, match=message):
        load_model(tmp_path / "packed", device="cpu")


@pytest.mark.parametrize("family", ["molmo/d", "qwen_vl"])
def test_a_method_of_transformers_is_refused_by_families_with_their_own_layers(family, tmp_path):
    shutil.copytree(GOLDEN / family, folder := tmp_path / "packed")
    (folder / "hf_quant_config.json").write_text('{"quantization": {}}')
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedCheckpoint, match="only transformers' layers support"):
        load_model(folder, device="cpu")


def opened(random_checkpoint, folder, **config) -> Checkpoint:
    return Checkpoint.open(changed(random_checkpoint, Path(folder) / "changed", "config", config))


def test_layers_without_an_operator_on_the_device_are_refused_by_name(random_checkpoint, tmp_path):
    """The CPU, for example, has no operator for transformers' FP8 layer."""
    checkpoint = opened(random_checkpoint, tmp_path, quantization_config=FP8)
    plain = torch.nn.Linear(4, 128, dtype=torch.bfloat16)
    module = torch.nn.Sequential(plain, FP8Linear(128, 128, block_size=(128, 128)))
    with pytest.raises(UnsupportedCheckpoint, match=r"'fp8', which the device cpu cannot run in bfloat16 \(1\)"):
        try_layers(checkpoint, module, CPU(), torch.bfloat16)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", [None, "text_config", "language_config"])
def test_quantisation_settings_are_found_in_any_section(key, part, random_checkpoint, tmp_path):
    config = {key: FP8}
    checkpoint = opened(random_checkpoint, tmp_path, **(config if part is None else {part: config}))
    assert quantization(checkpoint) == FP8


def test_settings_that_are_switched_off_quantise_nothing(random_checkpoint, tmp_path):
    off = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    assert not is_quantized(opened(random_checkpoint, tmp_path, quantization_config=off))
    load_model(tmp_path / "changed", device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "quanto", "weights": "int8"},
        {"quant_method": "hqq", "quant_config": {}},
    ],
)
def test_formats_that_need_more_than_a_multiplication_are_refused(settings, random_checkpoint, tmp_path):
    checkpoint = opened(random_checkpoint, tmp_path, quantization_config=settings)
    assert format_of(checkpoint) is None
    with pytest.raises(UnsupportedCheckpoint, match="cannot run here"):
        check_quantization(checkpoint, CPU())
