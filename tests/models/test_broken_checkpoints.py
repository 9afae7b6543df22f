"""Tests that loading an unusable checkpoint raises an error that states the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.quantized import refuse_quantized
from mindie_mm.tokenize import Tokenizer

Weights = dict[str, torch.Tensor]
FIRST = "model.language_model.layers.0.self_attn.q_proj.weight"


def rewrite(folder: Path, change: Callable[[Weights], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def names(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


def refused(folder: Path) -> str:
    with pytest.raises(UnsupportedCheckpoint) as error:
        load_model(folder, device="cpu")
    message = str(error.value)
    assert str(folder) in message
    return message


def test_missing_weights_are_named(copy):
    gone = names(copy)[2:5]
    rewrite(copy, lambda weights: [weights.pop(name) for name in gone])
    message = refused(copy)
    assert "lacks 3 weights" in message
    assert "layers.0" in message or "lm_head" in message or "embed" in message


def test_unexpected_weights_are_named(copy):
    rewrite(copy, lambda weights: weights.update({"model.adapter.weight": torch.zeros(2), "zeta": torch.zeros(2)}))
    message = refused(copy)
    assert "2 weights that its model class does not have" in message
    assert "model.adapter.weight" in message


@pytest.mark.parametrize("change", ["weight", "config"])
def test_shapes_that_do_not_fit_are_named(copy, change):
    if change == "weight":
        name = next(name for name in names(copy) if name.endswith("layers.0.self_attn.q_proj.weight"))
        rewrite(copy, lambda weights: weights.update({name: torch.zeros(8, 8)}))
    else:
        text = json.loads((copy / "config.json").read_text())["text_config"]
        reconfigure(copy, text_config=text | {"intermediate_size": 96})
    message = refused(copy)
    assert "shape" in message
    assert "q_proj" in message if change == "weight" else "mlp" in message
    assert len(message) < 2000, message


def test_a_checkpoint_is_refused_before_any_weight_is_read(copy):
    (copy / "model.safetensors").unlink()
    file = copy / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))
    assert "do_resize is False" in refused(copy)


def test_a_missing_weights_file_is_named(copy):
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in refused(copy)


@pytest.mark.parametrize("content", [b"", b"\x10", b"not a file of weights at all, and longer than a header"])
def test_a_weights_file_without_weights_is_refused(copy, content):
    (copy / "model.safetensors").write_bytes(content)
    refused(copy)


def test_a_truncated_weights_file_is_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not contain a JSON object"),
        ("{}", "no model_type"),
        (None, "no config.json"),
    ],
)
def test_an_unreadable_config_json_is_refused(copy, content, message):
    file = copy / "config.json"
    file.unlink() if content is None else file.write_text(content)
    assert message in refused(copy)
    with pytest.raises(UnsupportedCheckpoint, match=message):
        Tokenizer.from_pretrained(copy)


def test_a_hub_name_is_refused_with_the_download_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/empty").mkdir(parents=True)
    with pytest.raises(UnsupportedCheckpoint, match=r"hf download Qwen/Qwen2-VL-2B --local-dir Qwen2-VL-2B$"):
        Checkpoint.open("Qwen/Qwen2-VL-2B")
    for path in ("models/empty", "../Qwen/Qwen2-VL-2B", "/Qwen/Qwen2-VL-2B", "Qwen2-VL-2B", "a/b/c"):
        with pytest.raises(UnsupportedCheckpoint, match=r"it has no config\.json(\. The folder also lacks |$)"):
            Checkpoint.open(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_an_unreadable_tokenizer_is_refused(copy, name):
    (copy / name).write_text("{")
    with pytest.raises(UnsupportedCheckpoint, match="tokenizer"):
        Tokenizer.from_pretrained(copy)


def test_contradictory_sizes_are_refused(copy):
    text = json.loads((copy / "config.json").read_text())["text_config"]
    reconfigure(copy, text_config=text | {"num_attention_heads": 3})
    refused(copy)


def test_an_unknown_dtype_is_refused(copy):
    with pytest.raises(InputError, match="dtype='float8'"):
        load_model(copy, device="cpu", dtype="float8")


def test_a_modality_that_the_family_lacks_is_refused(copy, tmp_path):
    with (
        Tokenizer.from_pretrained(copy) as tokenizer,
        pytest.raises(InputError, match="does not accept audio inputs; it accepts image, video"),
    ):
        tokenizer.tokenize([{"audio": b"RIFF"}], tmp_path / "shm_name.txt")


def test_an_unknown_quantisation_is_refused(copy):
    reconfigure(copy, quantization_config={"quant_method": "abacus"})
    message = refused(copy)
    assert "quantized with 'abacus', which transformers does not support; it supports aqlm" in message


def test_families_with_their_own_layers_refuse_quantized_weights(copy):
    refuse_quantized(Checkpoint.open(copy))
    reconfigure(copy, quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedCheckpoint, match="only transformers' layers support"):
        refuse_quantized(Checkpoint.open(copy))
