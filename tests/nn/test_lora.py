"""Tests for LoRA adapters: their files, and their formulas against merged weights."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mindie_mm.device.cpu.onednn_linear import OneDNNLinear, has_onednn
from mindie_mm.errors import InputError, LimitExceeded, UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.lora.adapter_config import read_config
from tests.lora_samples import PREFIX, linear_names, merge, write_adapter
from tools.random_checkpoint import write_checkpoint

IDS = torch.arange(40, 90)
LAYERS = "model.language_model.layers"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def plain(random_checkpoint):
    """Return the unprepared model, which has the names of transformers."""
    return load_model(random_checkpoint, "cpu", "float32", prepares=False).module


@pytest.fixture(scope="module")
def model(random_checkpoint):
    model = load_model(random_checkpoint, "cpu", "float32")
    model.enable_loras(2, 8)
    return model


@pytest.fixture(scope="module")
def attention(plain):
    return [name for name in linear_names(plain) if name.startswith(LAYERS) and name.endswith(PROJECTIONS)]


@pytest.fixture
def adapter(tmp_path, plain, attention):
    """Return the folder of an adapter, which a test may damage."""
    return write_adapter(tmp_path / "adapter", plain, attention)


def logits(model, folder):
    adapter = model.loras.read(folder)
    with model.adapted([(adapter, len(IDS))]):
        return model.logits(IDS)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rank_pattern": {"q_proj": 5, r"layers\.1\.self_attn\.v_proj": 2}},
        {"alpha_pattern": {"o_proj": 1, "k_proj": 20.5}, "rank_pattern": {"^model.*k_proj": 4}},
        {"use_rslora": True, "rank": 7},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "bias": "lora_only", "biases": ("q_proj",)},
        {"lora_bias": True},
        {"bias": "all", "biases": ("q_proj", "k_proj", "v_proj")},
        {"modules_to_save": ["lm_head"], "whole": ("lm_head",)},
        {"modules_to_save": ["embed_tokens"], "whole": ("model.language_model.embed_tokens",)},
        {"modules_to_save": ["embed_tokens", "lm_head"], "whole": ("lm_head", "model.language_model.embed_tokens")},
        {"modules_to_save": ["down_proj"], "whole": (f"{LAYERS}.0.mlp.down_proj",)},
    ],
    ids=str,
)
def test_the_logits_equal_those_of_merged_weights(config, random_checkpoint, model, plain, attention, tmp_path):
    biases = [name for name in attention if name.endswith(config.get("biases", ()) or "-")]
    folder = write_adapter(tmp_path / "adapter", plain, attention, **{**config, "biases": biases})
    merged = load_model(random_checkpoint, "cpu", "float32", prepares=False)
    without = merged.logits(IDS)
    merge(merged.module, folder)
    expected = merged.logits(IDS)
    found = logits(model, folder)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - without).abs().max() > 0.1
    torch.testing.assert_close(model.logits(IDS), without, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rename",
    [
        ((r"^model\.language_model\.", "model."),),
        ((r"^model\.", ""),),
    ],
    ids=str,
)
def test_names_of_older_releases_of_transformers_are_translated(rename, model, plain, attention, adapter, tmp_path):
    old = write_adapter(tmp_path / "old", plain, attention, rename=rename)
    assert torch.equal(logits(model, old), logits(model, adapter))


@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=str)
def test_an_output_layer_is_changed_beside_its_own_weight(config, random_checkpoint, model, plain, tmp_path):
    """The weight of an output layer that peft stores beside its change may be another one than the base model's."""
    folder = write_adapter(tmp_path / "adapter", plain, ["lm_head"], **config)
    expected = logits(model, folder)
    changed(folder, lambda own: own.update({f"{PREFIX}lm_head.base_layer.weight": plain.lm_head.weight.clone()}))
    assert torch.equal(logits(model, folder), expected)
    changed(folder, lambda own: own[f"{PREFIX}lm_head.base_layer.weight"].mul_(2))
    merged = load_model(random_checkpoint, "cpu", "float32", prepares=False)
    merged.module.lm_head.weight = torch.nn.Parameter(2 * plain.lm_head.weight)
    changed(folder, lambda own: own.pop(f"{PREFIX}lm_head.base_layer.weight"))
    merge(merged.module, folder)
    changed(folder, lambda own: own.update({f"{PREFIX}lm_head.base_layer.weight": 2 * plain.lm_head.weight}))
    torch.testing.assert_close(logits(model, folder), merged.logits(IDS), rtol=1e-4, atol=1e-4)


def test_equal_files_have_equal_keys(model, plain, attention, adapter, tmp_path):
    same = write_adapter(tmp_path / "same", plain, attention)
    other = write_adapter(tmp_path / "other", plain, attention, seed=1)
    keys = [model.loras.read(folder).key for folder in (adapter, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_the_least_recently_used_adapter_leaves_the_device_and_comes_back(model, plain, attention, tmp_path):
    folders = [write_adapter(tmp_path / str(seed), plain, attention, seed=seed) for seed in range(3)]
    first = [logits(model, folder) for folder in folders]
    adapters = [model.loras.read(folder) for folder in folders]

    def run(number):
        with model.adapted([(adapters[number], len(IDS))]):
            return model.logits(IDS)

    for number in (0, 1, 0, 2, 1):
        assert torch.equal(run(number), first[number])
        assert model.loras.num_placed <= 2
    assert adapters[2] in model.loras._placed
    assert adapters[0] not in model.loras._placed


def test_a_folder_that_is_no_adapter_is_refused_with_what_to_do(model, random_checkpoint, adapter, tmp_path):
    def refused(folder, error, message):
        with pytest.raises(error, match=message):
            model.loras.read(folder)

    refused(tmp_path / "nowhere", InputError, "is not a folder; give the folder of a LoRA adapter")
    refused(random_checkpoint, InputError, "is a checkpoint, not an adapter")
    refused(tmp_path, InputError, "has no adapter_config.json")
    (adapter / "adapter_model.safetensors").unlink()
    refused(adapter, UnsupportedCheckpoint, "the file adapter_model.safetensors is missing")


class Bomb:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_refused_and_not_read(name, model, adapter, tmp_path):
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(UnsupportedCheckpoint, match=f"{name}, a pickle, which could run code and is not read"):
        model.loras.read(adapter)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64, pickle.dumps({"a": 1})],
    ids=["empty", "cut", "noise", "pickle"],
)
def test_damaged_weights_are_refused(content, model, adapter):
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match=r"cannot be read|contains no tensor"):
        model.loras.read(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not served; only LORA is"),
        ({"peft_type": None}, "peft_type=None"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' means that training has changed"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights="),
        ({"bias": "some"}, "bias='some' must be one of none, all, lora_only"),
        ({"use_dora": "yes"}, "use_dora='yes' must be true or false"),
        ({"r": 0}, "r=0 must be an integer from 1 to 16384"),
        ({"r": True}, "r=True"),
        ({"r": 2.5}, "r=2.5"),
        ({"lora_alpha": "16"}, "lora_alpha='16' must be a number"),
        *(({"lora_alpha": value}, "must be a number from -1e+06 to 1e+06") for value in (1e39, 10**20, 10**200)),
        ({"lora_alpha": 1e999}, "is not JSON"),
        ({"alpha_pattern": {"q_proj": 10**200}}, "alpha_pattern="),
        ({"rank_pattern": {"q_proj": 10**30}}, "must map names of layers to ranks up to 16384"),
        ({"\ud800": 1}, "is not JSON"),
        ({"use_dora": "x\ud800"}, "is not JSON"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern="),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern="),
        *(
            ({"alpha_pattern": {pattern: 3}}, "and .* at most twice. Name the layers instead")
            for pattern in ("(a+)+b", "[", ".*.*.*X", "a{9}", r"\.*", "*", "a+", "é\n")
        ),
        ({"rank_pattern": {f"layer{number}": 3 for number in range(5000)}}, "has 5000 keys; the limit is 4096"),
        ({"alpha_pattern": {"q" * 600: 3}}, "at most 500 characters"),
        ({"use_qalora": True}, "use_qalora=True is not served; merge the adapter"),
        ({"x" * 2000: "y" * 2000}, f"{'x' * 500}='{'y' * 499} is not served"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
        ({"setting_of_next_year": {"a": 1}}, "setting_of_next_year={'a': 1} is not served"),
    ],
    ids=str,
)
def test_settings_that_are_not_served_are_named(change, message, model, adapter):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)):
        model.loras.read(adapter)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "1" * 2**21, "[" * 100_000], ids=["empty", "list", "cut", "big", "deep"]
)
def test_settings_that_are_not_an_object_are_refused(text, model, adapter):
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(UnsupportedCheckpoint, match=r"is not JSON|must be an object|the limit is"):
        model.loras.read(adapter)


def changed(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


Q = f"base_model.model.{LAYERS}.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.update({f"{Q}.lora_A.weight": torch.zeros(3, 99)}), r"has shape \[3, 99\] instead of \[3, "),
        (
            lambda own: own.update({f"{Q}.lora_B.weight": torch.zeros(99, 3)}),
            r"\[99, 3\].*Serve the adapter with its own",
        ),
        (lambda own: own.update({f"{Q}.lora_A.weight": torch.zeros(3)}), r"has shape \[3\]"),
        (lambda own: own.update({f"{Q}.lora_A.weight": torch.zeros(())}), r"has shape \[\]"),
        (lambda own: own.pop(f"{Q}.lora_B.weight"), "lora_A or lora_B is missing"),
        (lambda own: own.pop(f"{Q}.lora_A.weight"), "lora_A or lora_B is missing"),
        (lambda own: own.update({"base_model.model.h.0.c_attn.lora_A.weight": torch.zeros(3, 8)}), "no linear layer"),
        (lambda own: own.update({f"{LAYERS}.0.mlp.experts.lora_A.weight": torch.zeros(3, 8)}), "an expert"),
        (lambda own: own.update({f"{Q}.lora_embedding_A": torch.zeros(3, 8)}), "is not served; only changes"),
        (lambda own: own.update({f"{LAYERS}.0.input_layernorm.weight": torch.zeros(8)}), "no linear layer"),
        (lambda own: own.update({f"{Q}.lora_magnitude_vector": torch.ones(8)}), "magnitude without use_dora"),
        (lambda own: own.update({f"{Q}.lora_B.bias": torch.zeros(9)}), r"has shape \[9\] instead of"),
        (lambda own: own.update({f"{Q}.weight": torch.zeros(8, 8)}), "both changed and replaced"),
        (lambda own: own.update({f"{Q}.base_layer.bias": torch.zeros(8), f"{Q}.bias": torch.zeros(8)}), "given twice"),
        (
            lambda own: own.update({f"{Q}.lora_A.weight": own[f"{Q}.lora_A.weight"].int()}),
            "has the data type I32; it must be one of F16, BF16, F32, F64",
        ),
        *(
            (
                lambda own, dtype=dtype: own.update({f"{Q}.lora_A.weight": own[f"{Q}.lora_A.weight"].to(dtype)}),
                "has the data type F8",
            )
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        ),
        *(
            (
                lambda own, value=value: own[f"{Q}.lora_B.weight"].fill_(value),
                "is not finite in torch.float32; the file",
            )
            for value in (torch.nan, -torch.inf, 3e38)
        ),
        (
            lambda own: own.update(
                {name.replace(LAYERS, "model.layers"): tensor.clone() for name, tensor in own.items()}
            ),
            "which the file also changes under another name",
        ),
        (lambda own: own.clear(), "contains no tensor"),
        (
            lambda own: own.update({"base_model.model.lm_head.weight": torch.zeros(9, 8)}),
            r"lm_head.weight has shape \[9, 8\] instead of",
        ),
    ],
)
def test_weights_of_another_model_are_named_with_their_shapes(change, message, model, adapter):
    changed(adapter, change)
    with pytest.raises(UnsupportedCheckpoint, match=message):
        model.loras.read(adapter)


def test_a_rank_beyond_the_limit_or_unlike_the_settings_is_refused(model, plain, attention, adapter, tmp_path):
    large = write_adapter(tmp_path / "large", plain, attention, rank=9)
    with pytest.raises(LimitExceeded, match=r"has rank 9; the limit is 8\. Raise max_lora_rank"):
        model.loras.read(large)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 4}))
    with pytest.raises(UnsupportedCheckpoint, match=r"has rank 3, but adapter_config.json states 4"):
        model.loras.read(adapter)


def test_an_adapter_that_is_larger_than_the_reserved_memory_is_refused(random_checkpoint, plain, attention, tmp_path):
    model = load_model(random_checkpoint, "cpu", "float32")
    loras = model.enable_loras(2, 1)
    reserved = loras.reserve()
    small = loras.read(write_adapter(tmp_path / "small", plain, attention, rank=1))
    large = loras.read(write_adapter(tmp_path / "large", plain, attention, rank=1, whole=["lm_head"]))
    loras.require_fitting(small)
    with pytest.raises(LimitExceeded, match="raise max_lora_rank, or give the adapter at the start"):
        loras.require_fitting(large)
    loras.known[large.key] = large
    assert loras.reserve() == 2 * large.num_values() * 4 > reserved
    loras.require_fitting(large)


def test_an_adapter_of_the_highest_rank_in_all_layers_fits(random_checkpoint, plain, tmp_path):
    loras = load_model(random_checkpoint, "cpu", "float32").enable_loras(2, 8)
    loras.reserve()
    names = [*linear_names(plain), "lm_head"]
    for number, config in enumerate(({}, {"lora_bias": True}, {"use_dora": True})):
        folder = write_adapter(tmp_path / f"{number}", plain, names, rank=8, **config)
        loras.require_fitting(loras.read(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_changes_of_magnitudes_are_kept_in_all_data_types(dtype, random_checkpoint, plain, attention, adapter):
    def change(own):
        for name in [name for name in own if name.endswith("lora_B.weight")]:
            layer = name.removesuffix(".lora_B.weight")
            own[name].zero_()
            rounded = plain.get_submodule(layer.removeprefix(PREFIX)).weight.to(getattr(torch, dtype))
            norm = rounded.float().norm(dim=1)
            own[f"{layer}.lora_magnitude_vector"] = norm * 1.003

    changed(adapter, change)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    loras = load_model(random_checkpoint, "cpu", dtype).enable_loras(1, 8)
    for one in loras.read(adapter).changes:
        torch.testing.assert_close(one.growth.float(), torch.full_like(one.growth, 0.003).float(), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_cannot_be_read_are_named(name, model, adapter, monkeypatch):
    read = Path.read_bytes

    def refuse(path):
        if path.name == name:  # without its permissions, because the superuser may read all files
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UnsupportedCheckpoint, match=r"cannot be read: .*Permission denied"):
        model.loras.read(adapter)


@pytest.mark.parametrize("name", ["llava15", "qwen3_vl_8b"])
def test_settings_of_published_adapters_are_served(name):
    config, _ = read_config(Path(__file__).parents[1] / "cases" / "loras" / name)
    assert (config.rank, config.scaling_of("model.layers.0.self_attn.q_proj")) == (16, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of its own biases
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_dora": True, "rank_pattern": {"k_proj": 2}},
        {"use_rslora": True, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3}},
        {
            "use_dora": True,
            "use_rslora": True,
            "rank_pattern": {"^model.*q_proj": 6},
            "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 9},
        },
        {"target_modules": ["o_proj", "gate_proj", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["down_proj"]},
        {"bias": "lora_only"},
        {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_an_adapter_that_peft_writes_has_the_logits_of_peft(config, random_checkpoint, model, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    reference = AutoModelForImageTextToText.from_pretrained(random_checkpoint, dtype=torch.float32)
    given = {"r": 4, "lora_alpha": 6, "target_modules": [*PROJECTIONS], "init_lora_weights": False} | config
    torch.manual_seed(0)
    adapted = peft.get_peft_model(reference, peft.LoraConfig(**given)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and ("bias" in name or "magnitude" in name or "modules_to_save" in name):
                parameter.add_(torch.rand_like(parameter) / 10)
        adapted.save_pretrained(tmp_path / "adapter")
        expected = adapted(input_ids=IDS[None]).logits[0]
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert settings["init_lora_weights"] is False
    torch.testing.assert_close(logits(model, tmp_path / "adapter"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.lora_embedding_A is not served"),
        ({"modules_to_save": ["post_attention_layernorm"]}, "post_attention_layernorm.weight changes"),
        ({"target_modules": ["patch_embed.proj"]}, "patch_embed.proj.lora_A.weight changes"),
        ({"bias": "all"}, ".bias changes"),
        ({"trainable_token_indices": [3, 5]}, "trainable_token_indices="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; training has changed"),
    ],
    ids=str,
)
def test_what_peft_writes_and_is_not_served_is_refused_with_the_key(config, named, random_checkpoint, model, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    reference = AutoModelForImageTextToText.from_pretrained(random_checkpoint, dtype=torch.float32)
    given = {"r": 4, "lora_alpha": 6, "target_modules": [*PROJECTIONS]} | config
    peft.get_peft_model(reference, peft.LoraConfig(**given)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(named)):
        model.loras.read(tmp_path / "adapter")


def test_an_adapter_changes_int8_weights_as_it_changes_others(random_checkpoint, model, adapter):
    quantized = load_model(random_checkpoint, "cpu", "float32", weights="int8")
    quantized.enable_loras(1, 8)
    plain, with_adapter = model.logits(IDS), logits(model, adapter)
    rounding = (quantized.logits(IDS) - plain).abs().mean()
    difference = (logits(quantized, adapter) - with_adapter).abs().mean()
    assert 0 < rounding < 0.1 * (with_adapter - plain).abs().mean()
    assert difference < 2 * rounding


@pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN here")
def test_an_adapter_changes_layers_that_onednn_multiplies(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "small", "small")
    plain = load_model(path, "cpu", "float32", prepares=False).module
    folder = write_adapter(tmp_path / "adapter", plain, [*linear_names(plain), "lm_head"])
    found = []
    for choice in ("yes", "no"):
        monkeypatch.setenv("MINDIE_MM_KERNELS", f"onednn={choice}")
        model = load_model(path, "cpu", "float32")
        assert any(isinstance(part, OneDNNLinear) for part in model.module.modules()) is (choice == "yes")
        model.enable_loras(1, 8)
        found.append(logits(model, folder))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
