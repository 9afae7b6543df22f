"""Tests for checkpoints of compressed-tensors, GPTQ and AWQ, beside models of the same numbers in floating point."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindie_mm.device import QuantizedLinear
from mindie_mm.device.cpu import decode_step
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import packed_logits
from mindie_mm.nn.weights.formats import format_of
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.integer_formats import Scheme, awq, compressed, gptq, int_quantized, pack_quantized, write
from tests.models.modelslim import round_inputs
from tests.models.steps import step_logits
from tests.models.test_modelslim import OWN_LAYERS, assert_alike
from tests.models.test_qwen3_vl_moe import TestQwen3VLMoe as Qwen3VLMoe
from tests.models.test_qwen3_vl_moe import separate_experts
from tests.models.test_qwen_vl import position_table
from tests.published.checkpoints import FOLDER

IDS = torch.arange(10, 40)
TEXT = r"model\.layers\..*_proj\.weight"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def of_compressed(kind, scheme):
    return compressed(kind, scheme), int_quantized if kind == "int-quantized" else pack_quantized, scheme


CASES = {
    "W8A8 dynamic": of_compressed("int-quantized", Scheme(8, inputs="dynamic")),
    "W8A8 static": of_compressed("int-quantized", Scheme(8, inputs="static")),
    "W8A8 tensor": of_compressed("int-quantized", Scheme(8, 0, inputs="static")),
    "W8A16 rows": of_compressed("int-quantized", Scheme(8)),
    "W8A16 groups": of_compressed("int-quantized", Scheme(8, 32, symmetric=False)),
    "packed W8A16": of_compressed("pack-quantized", Scheme(8, symmetric=False)),
    "W4A16 groups": of_compressed("pack-quantized", Scheme(4, 32)),
    "W4A16 zeros": of_compressed("pack-quantized", Scheme(4, 32, symmetric=False)),
    "W4A16 shuffled": of_compressed("pack-quantized", Scheme(4, 16, shuffled=True)),
    "W4A16 rows": of_compressed("pack-quantized", Scheme(4)),
    "W4A16 groups of 16": of_compressed("pack-quantized", Scheme(4, 16)),
    "GPTQ": (GPTQ, gptq, Scheme(4, 32)),
    "GPTQ zeros": ({**GPTQ, "sym": False}, gptq, Scheme(4, 32, symmetric=False)),
    "GPTQ shuffled": ({**GPTQ, "desc_act": True}, gptq, Scheme(4, 32, shuffled=True)),
    "GPTQ rows": ({**GPTQ, "group_size": -1}, gptq, Scheme(4)),
    "GPTQ v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        partial(gptq, shift=0),
        Scheme(4, 32, symmetric=False),
    ),
    "GPTQ 8 bits": ({**GPTQ, "bits": 8}, gptq, Scheme(8, 32)),
    "GPTQ 2 bits": ({**GPTQ, "bits": 2}, gptq, Scheme(2, 32)),
    "AWQ": (AWQ, awq, Scheme(4, 32, symmetric=False)),
}

COMPILED = sorted(name for name in CASES if "shuffled" not in name)


def matching(pattern, group):
    """Return a function that selects the matrices whose name matches `pattern` and whose sizes fit the group."""
    found = re.compile(pattern)

    def matches(name, weight):
        fits = weight.ndim == 2 and len(weight) % 8 == weight.shape[1] % max(group or 1, 8) == 0
        return fits and found.fullmatch(name)

    return matches


def pair(case, source, folder, pattern=TEXT):
    settings, writer, scheme = case
    packed, plain = folder / "packed", folder / "plain"
    shutil.copytree(source, packed)
    shutil.copytree(source, plain)
    weights, layers = write(packed, settings, writer, scheme, matching(pattern, scheme.group))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors")
    expected = load_model(plain, device="cpu", prepares=False)
    if scheme.inputs:
        assert round_inputs(expected.module, layers) > 0.9 * len(layers)
    return load_model(packed, device="cpu"), expected


@pytest.mark.parametrize("name", CASES)
def test_each_format_computes_with_the_published_numbers(name, random_checkpoint, tmp_path):
    found, expected = pair(CASES[name], random_checkpoint, tmp_path)
    layers = [layer for layer in found.module.modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == (14 if CASES[name][2].shuffled else 8), "layers without a table of groups are joined"
    packed = {layer.values.dtype == torch.uint8 for layer in layers if layer.in_features % decode_step.NIBBLES == 0}
    assert packed == {CASES[name][2].bits < 8}, "two values per byte"
    logits = found.logits(IDS)
    if CASES[name][2].inputs:
        assert_alike(logits, expected.logits(IDS))
    else:
        assert (logits - expected.logits(IDS)).abs().max() <= 1e-4
    assert (packed_logits(found, [IDS[:7], IDS])[1] - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("name", COMPILED)
def test_weights_run_in_compiled_decode_steps(name, random_checkpoint, tmp_path, caplog, monkeypatch):
    if decode_step._load(decode_step._best()) is None:
        pytest.skip("the package was installed without a C compiler")
    monkeypatch.setenv("MINDIE_MM_KERNELS", "step=best")
    with caplog.at_level("INFO"):
        found, _ = pair(CASES[name], random_checkpoint, tmp_path)
    assert "compiled code" in caplog.text
    assert_alike(step_logits(found, IDS), found.logits(IDS)[-1])
    if not CASES[name][2].inputs:
        assert (step_logits(found, IDS) - found.logits(IDS)[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPTQ shuffled", "layers that are not replaced"),
    ],
)
def test_the_log_says_why_other_weights_run_in_torch(name, reason, random_checkpoint, tmp_path, caplog):
    with caplog.at_level("INFO"):
        pair(CASES[name], random_checkpoint, tmp_path)
    assert "torch runs all decode steps" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["W8A8 dynamic", "W4A16 zeros", "GPTQ", "AWQ"])
@pytest.mark.parametrize("family", OWN_LAYERS)
def test_families_with_layers_of_their_own_are_served(family, name, tmp_path):
    golden, pattern = OWN_LAYERS[family]
    (source := tmp_path / "source").mkdir()
    weights = drawn_weights(GOLDEN / golden)
    if family == "qwen_vl":
        weights["transformer.visual.attn_pool.pos_embed"] = position_table(16, 256)
    write_checkpoint(GOLDEN / golden, source, weights)
    found, expected = pair(CASES[name], source, tmp_path, pattern)
    assert sum(isinstance(layer, QuantizedLinear) for layer in found.module.modules()) > 10
    assert_alike(found.logits(IDS), expected.logits(IDS))


@pytest.mark.parametrize("name", ["W8A8 dynamic", "W8A16 rows", "AWQ", "GPTQ shuffled"])
@pytest.mark.parametrize("partly", [False, True])
def test_separate_experts_stay_quantized(partly, name, tmp_path):
    """If an expert of a layer is not quantized, all experts of the layer are dequantized."""
    (joined := tmp_path / "joined").mkdir()
    Qwen3VLMoe.write_checkpoint(joined)
    source = separate_experts(joined, tmp_path / "source")
    pattern = rf".*language_model\.layers\.{'(?!0.*experts.1)' if partly else ''}.*_proj\.weight"
    found, expected = pair(CASES[name], source, tmp_path, pattern)
    layers = {path for path, layer in found.module.named_modules() if isinstance(layer, QuantizedLinear)}
    own = [path for path in layers if ".arranged." in path]
    separate = 3 if CASES[name][2].shuffled else 2  # a table of groups prevents joining gate and up
    assert len(own) == (1 if partly else 2) * separate * 8, "eight experts in two of the three layers"
    if not CASES[name][2].inputs:
        assert (found.logits(IDS) - expected.logits(IDS)).abs().max() <= 1e-4
    elif not partly:  # `expected` rounds the inputs of dequantized experts, too
        assert_alike(found.logits(IDS), expected.logits(IDS))


def test_groups_choose_layers_by_name_pattern_and_class(random_checkpoint, tmp_path):
    folder = shutil.copytree(random_checkpoint, tmp_path / "packed")
    scheme = Scheme(8, inputs="dynamic")
    settings = compressed("int-quantized", scheme)
    groups = settings["config_groups"]
    unrounded = groups["group_0"] | {"input_activations": None}
    groups |= {
        "group_1": unrounded | {"targets": ["re:.*layers.0.*down_proj$"]},
        "group_2": unrounded | {"targets": ["model.layers.1.mlp.up_proj"]},
    }
    write(folder, settings, int_quantized, scheme, matching(TEXT, None))
    layers = {
        name: layer.rounds_input
        for name, layer in load_model(folder, device="cpu").module.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    unrounded = {name for name, rounds in layers.items() if not rounds}
    assert {name.partition("layers.")[2] for name in unrounded} == {"0.down", "1.mlp.up_proj"}
    assert len(layers) == 4 + 7, "gate and up of the second layer round differently, so nothing is joined there"


@pytest.mark.parametrize("name", ["qwen_vl_int4", "molmo_nf4"])
def test_published_names_are_those_of_the_format(name):
    packing = format_of(Checkpoint.open(FOLDER / name))
    parts = {}
    for tensor in json.loads((FOLDER / name / "weight_names.json").read_text()):
        weight, part = packing.split(tensor)
        parts.setdefault(weight, set()).add(part)
    packed = {weight: own for weight, own in parts.items() if packing.parts(weight, own)[0]}
    assert len(packed) == (5 if name == "qwen_vl_int4" else 4), "the layers of each block"
    for weight, own in packed.items():
        needed, optional = packing.parts(weight, own)
        assert needed <= own <= needed | optional | {"bias"}


def spoiled(folder, **changes):
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = f"model.layers.0.mlp.gate_proj.{name}"
        if value is None:
            del weights[key]
        else:
            weights[key] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("W8A8 dynamic", {"weight_scale": None}, "gate_proj.weight is stored as int8"),
        ("W8A8 dynamic", {"weight_scale": torch.ones(3, 1)}, "weight_scale has shape [3, 1]; it must have 128 rows"),
        ("W8A8 static", {"input_scale": None}, "input_scale is missing"),
        ("W8A8 dynamic", {"weight": torch.ones(128, 64)}, "weight is float32 [128, 64]; it must be int8"),
        ("W4A16 groups", {"weight_scale": torch.ones(128, 3)}, "64 must be a multiple of their number of columns"),
        ("W4A16 groups", {"weight_shape": torch.tensor([128, 32])}, "32 numbers of 4 bits are packed into 8 columns"),
        ("W4A16 groups", {"weight_shape": None}, "lacks model.layers.0.mlp.gate_proj.weight_shape"),
        ("W4A16 groups", {"zz": torch.ones(1)}, "1 weights that its model class does not have"),
        (
            "W8A16 rows",
            {"weight": torch.zeros(64, 64, dtype=torch.int8), "weight_scale": torch.ones(64, 1)},
            "[64, 64]",
        ),
        ("GPTQ", {"qzeros": None}, "lacks model.layers.0.mlp.gate_proj.qzeros"),
        ("GPTQ", {"qzeros": torch.zeros(3, 2).int()}, "qzeros is int32 [3, 2]; it must be int32 [2, 16]"),
        ("GPTQ", {"g_idx": torch.full((64,), 7).int()}, "another table of groups"),
        ("AWQ", {"scales": torch.ones(2, 128).int()}, "scales is torch.int32"),
        ("AWQ", {"qweight": torch.zeros(64, 3).int()}, "128 numbers of 4 bits are packed into 3 columns"),
    ],
)
def test_damaged_tensors_are_named(name, changes, message, random_checkpoint, tmp_path):
    folder = shutil.copytree(random_checkpoint, tmp_path / "packed")
    settings, writer, scheme = CASES[name]
    write(folder, settings, writer, scheme, lambda key, _: "mlp.gate_proj.weight" in key)
    spoiled(folder, **changes)
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)) as error:
        load_model(folder, device="cpu")
    assert str(folder) in str(error.value)
    assert "gate_proj" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**GPTQ, "bits": 3}, "bits=3 must be one of 2, 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "the setting dynamic"),
        ({**AWQ, "bits": 3}, "bits=3 must be 4"),
        ({**AWQ, "version": "gemv"}, "version='gemv' must be gemm"),
        (compressed("marlin-24", Scheme(4)), "the format 'marlin-24' with 4 bits is not supported"),
        (compressed("pack-quantized", Scheme(3)), "with 3 bits is not supported"),
        ({"quant_method": "compressed-tensors"}, "config_groups has no group"),
        ({**compressed("int-quantized", Scheme(8)), "sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
        (GPTQ, "states the quantization 'gptq', but none of its weights is quantized"),
    ],
)
def test_unknown_settings_are_refused(settings, message, copy):
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)):
        load_model(copy, device="cpu")
