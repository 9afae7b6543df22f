"""Tests for checkpoints that ModelSlim quantized, beside models of the same numbers in floating point."""

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mindie_mm.device import QuantizedLinear, QuantizedWeight, StaticInput
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.model import packed_logits
from mindie_mm.nn.placement import Placement
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.modelslim import quantize, round_inputs
from tests.models.test_qwen_vl import position_table

IDS = torch.arange(10, 40)
KINDS = ("W8A8", "W8A8_DYNAMIC", "W8A8_MIX", "W8A16", "W4A8_DYNAMIC")
TEXT = re.compile(r"model\.layers\..*(_proj)\.weight")
OWN_LAYERS = {
    "molmo": ("molmo/d", r"model\.(vision_backbone\..*|transformer\.blocks\..*(att|ff).*)weight"),
    "qwen_vl": ("qwen_vl", r"transformer\.(h|visual)\..*(?<!in_proj_)weight"),
    "deepseek_vl2": (
        "deepseek_vl2/latent",
        r"(vision|projector|language\.model\.layers)\..*(?<!gate\.)weight",
    ),
}
"""Golden checkpoint of each family with layers of its own, and a pattern for the weights that are quantized."""


def in_turn(pattern, *kinds):
    """Return a function that gives the matrices whose name matches `pattern` these types in turn."""
    order = itertools.cycle(kinds)

    def kind_of(name, weight):
        matches = weight.ndim == 2 and len(weight) % 2 == 0 and re.fullmatch(pattern, name)
        return next(order) if matches else None

    return kind_of


def pair(source, folder, kind_of, **options):
    """Return a quantized model, and its model in floating point with rounded inputs."""
    packed, plain = folder / "packed", folder / "plain"
    shutil.copytree(source, packed)
    weights, layers = quantize(packed, kind_of, **options)
    shutil.copytree(source, plain)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors")
    expected = load_model(plain, device="cpu", prepares=False)
    assert round_inputs(expected.module, layers) > 0.9 * len(layers)
    return load_model(packed, device="cpu"), expected


def assert_alike(found, expected):
    """Compare logits in standard deviations. A value between two rounded values may be rounded to either of them."""
    difference = (found - expected).abs() / expected.std()
    assert difference.max() <= 0.2
    assert (difference <= 1e-4).float().mean() >= 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_computes_what_its_formula_says(kind, random_checkpoint, tmp_path):
    found, expected = pair(random_checkpoint, tmp_path, in_turn(TEXT, kind), wide_scales=True)
    layers = [layer for layer in found.module.modules() if isinstance(layer, CPUQuantizedLinear)]
    assert len(layers) == 8, "the projections of queries, keys and values are joined, and gate and up"
    assert {layer.values.dtype for layer in layers} == {torch.int8}
    logits = found.logits(IDS)
    assert_alike(logits, expected.logits(IDS))
    assert torch.allclose(packed_logits(found, [IDS[:7], IDS])[1], logits, rtol=0, atol=1e-4)


def test_layers_of_different_types_and_shards_are_read(random_checkpoint, tmp_path):
    kinds = in_turn(r".*(_proj|qkv|fc\d|proj)\.weight", *KINDS, None)
    found, expected = pair(random_checkpoint, tmp_path, kinds, shards=3)
    assert_alike(found.logits(IDS), expected.logits(IDS))


def test_files_of_older_releases_are_read(random_checkpoint, tmp_path):
    found, expected = pair(random_checkpoint, tmp_path, in_turn(TEXT, "W8A8"), older=True)
    assert_alike(found.logits(IDS), expected.logits(IDS))


@pytest.mark.parametrize("family", OWN_LAYERS)
def test_families_with_layers_of_their_own_are_served(family, tmp_path):
    golden, pattern = OWN_LAYERS[family]
    (source := tmp_path / "source").mkdir()
    weights = drawn_weights(GOLDEN / golden)
    if family == "qwen_vl":
        weights["transformer.visual.attn_pool.pos_embed"] = position_table(16, 256)
    write_checkpoint(GOLDEN / golden, source, weights)
    found, expected = pair(source, tmp_path, in_turn(pattern, *KINDS))
    assert sum(isinstance(layer, QuantizedLinear) for layer in found.module.modules()) > 20
    assert_alike(found.logits(IDS), expected.logits(IDS))


def random_weight(outputs, inputs, static):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    own = None
    if static:
        scales = torch.rand(outputs, generator=generator) / 100
        bias = torch.randint(-(2**20), 2**20, (outputs,), generator=generator).int()
        own = StaticInput(0.03, 5.0, scales, bias, has_bias=True)
    return QuantizedWeight(values, torch.rand(outputs, 1, generator=generator), rounds_input=True, static_input=own)


@pytest.mark.parametrize("inputs", [64, 1000, 5003])
def test_sums_of_integers_are_exact(inputs):
    weight = random_weight(24, inputs, static=False)
    rows = torch.randint(-128, 128, (7, inputs), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    rows[0], rows[1] = 127, -128
    expected = rows.numpy().astype(np.int64) @ weight.values.numpy().astype(np.int64).T
    for kind in (QuantizedLinear, CPUQuantizedLinear):
        assert np.array_equal(kind(weight, None).integer_product(rows).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_a_layer_computes_the_formula_in_any_dtype(static, dtype):
    weight = random_weight(24, 96, static)
    rows = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = rows.float().numpy().reshape(-1, 96)
    numbers = weight.values.numpy().astype(np.int64)
    if static:
        own = weight.static_input
        sums = np.clip(np.rint(values / np.float32(0.03) + np.float32(5)), -128, 127).astype(np.int64) @ numbers.T
        expected = (sums + own.bias.numpy()).astype(np.float32) * own.product_scales.numpy()
    else:
        scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
        expected = (np.rint(values / scales).astype(np.int64) @ numbers.T) * scales * weight.scales.numpy().T
    found = CPUQuantizedLinear(weight, None)(rows)
    assert (found.shape, found.dtype) == ((2, 5, 24), dtype)
    expected = torch.from_numpy(expected.astype(np.float32)).to(dtype).view(2, 5, 24)
    assert torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def test_rows_of_zeros_and_of_no_numbers_do_not_change_their_neighbours():
    layer = CPUQuantizedLinear(random_weight(24, 96, static=False), None)
    row = torch.randn(96, generator=torch.Generator().manual_seed(1))
    found = layer(torch.stack([row, torch.zeros(96), torch.full((96,), torch.inf), torch.full((96,), torch.nan)]))
    assert torch.equal(found[:1], layer(row[None]))
    assert not found[1].any()
    assert found[2:].isnan().all()


SUMS = """
import torch
from mindie_mm.device import QuantizedWeight
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear, is_exact
large = torch.full((1, 512), 127, dtype=torch.int8)
layer = CPUQuantizedLinear(QuantizedWeight(large, torch.ones(1, 1), rounds_input=True), None)
assert int(layer.integer_product(large)) == 512 * 127**2
print(is_exact())
"""


def test_products_that_saturate_are_not_used():
    """Without VNNI, oneDNN computes sums of 16 bits."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ended = subprocess.run([sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    if platform.machine() == "x86_64":
        assert ended.stdout.strip() == "False"


def test_biases_of_norms_are_added(random_checkpoint, tmp_path):
    packed = shutil.copytree(random_checkpoint, tmp_path / "packed")
    name = "model.layers.1.input_layernorm.bias"
    weights = load_file(packed / "model.safetensors")
    stored = next(key for key in weights if key.endswith("layers.1.input_layernorm.weight"))
    bias = torch.randn(len(weights[stored]), generator=torch.Generator().manual_seed(0))
    weights[name := stored.replace("weight", "bias")] = bias
    save_file(weights, packed / "model.safetensors", {"format": "pt"})
    quantize(packed, in_turn(TEXT, "W8A16"))
    without = shutil.copytree(packed, tmp_path / "without")
    stored_weights = load_file(without / "quant_model_weights.safetensors")
    del stored_weights[name]
    save_file(stored_weights, without / "quant_model_weights.safetensors", {"format": "pt"})
    found, expected = load_model(packed, device="cpu"), load_model(without, device="cpu", prepares=False)
    norm = expected.module.model.language_model.layers[1].input_layernorm
    norm.register_forward_hook(lambda _, __, normed: normed + bias)
    assert (found.logits(IDS) - expected.logits(IDS)).abs().max() <= 1e-4


def described(folder, **changes):
    file = folder / "quant_model_description.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stored(folder, change):
    file = folder / "quant_model_weights.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def quantized(random_checkpoint, tmp_path_factory):
    folder = shutil.copytree(random_checkpoint, tmp_path_factory.mktemp("slim") / "whole")
    quantize(folder, lambda name, _: "W8A8" if name == f"{GATE}.weight" else None)
    assert "gate_proj.deq_scale" in (folder / "quant_model_description.json").read_text()
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: stored(folder, lambda parts: parts.pop(f"{GATE}.deq_scale")), f"lacks {GATE}.deq_scale"),
        (lambda folder: stored(folder, lambda parts: parts.pop(f"{GATE}.weight")), f"lacks {GATE}.weight"),
        (
            lambda folder: stored(folder, lambda parts: parts.update({f"{GATE}.quant_bias": torch.zeros(3).int()})),
            "quant_bias is int32 [3]; it must be int32",
        ),
        (
            lambda folder: stored(folder, lambda parts: parts.update({f"{GATE}.input_scale": torch.zeros(1)})),
            "input_scale=0.0 must be positive",
        ),
        (
            lambda folder: stored(folder, lambda parts: parts.update({f"{GATE}.weight": torch.zeros(2, 3)})),
            "weight is float32 [2, 3]; it must be int8",
        ),
        (lambda folder: stored(folder, lambda parts: parts.update({"lm.zz": torch.zeros(1)})), "the first is lm.zz"),
        (lambda folder: described(folder, **{f"{GATE}.weight": "FLOAT"}), "but none of its weights is quantized"),
        (lambda folder: described(folder, **{"a.weight": "W8A8_MXFP8"}), "a.weight has the type W8A8_MXFP8"),
        (lambda folder: described(folder, **{"a.weight": "W8A8SC"}), "sparse, compressed weights of Atlas 300I"),
        (lambda folder: described(folder, **{"a.weight": 8}), "a.weight has the type 8"),
        (
            lambda folder: described(folder, metadata={"quarot": {"heads_rotation": {"layers": ["o_proj"]}}}),
            "heads_rotation rotates the input of o_proj",
        ),
        (lambda folder: (folder / "quant_model_description.json").write_text("[]"), "quant_model_description.json"),
        (lambda folder: shutil.copy(folder / "config.json", folder / "quant_model_description_x.json"), None),
    ],
)
def test_damaged_and_unknown_checkpoints_are_refused_by_name(damage, message, quantized, tmp_path):
    folder = shutil.copytree(quantized, tmp_path / "damaged")
    damage(folder)
    if message is None:
        load_model(folder, device="cpu")
        return
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)) as error:
        load_model(folder, device="cpu")
    assert str(folder) in str(error.value)


def test_a_description_that_is_missing_is_named(quantized, tmp_path):
    folder = shutil.copytree(quantized, tmp_path / "damaged")
    (folder / "quant_model_description.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantize": "w8a8"}))
    with pytest.raises(UnsupportedCheckpoint, match=r"quantize is 'w8a8'.*there is no quant_model_description.json"):
        load_model(folder, device="cpu")


def test_a_quantized_tower_cannot_be_moved(random_checkpoint, tmp_path):
    folder = shutil.copytree(random_checkpoint, tmp_path / "packed")
    quantize(folder, in_turn(r".*visual.*fc1\.weight", "W8A8_DYNAMIC"))
    with pytest.raises(InputError, match="this part is quantized"):
        load_model(folder, device="cpu", vision=Placement(bits=16))


def test_the_description_decides_not_the_key_in_config_json(quantized, tmp_path):
    folder = Path(shutil.copytree(quantized, tmp_path / "named"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantize": "w8a8"}))
    assert torch.isfinite(load_model(folder, device="cpu").logits(IDS)).all()
