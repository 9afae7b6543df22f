"""Tests that published config.json files are read as in the releases of transformers for which they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import settle

FOLDER = Path(__file__).parent
RECORDED = json.loads((FOLDER / "resolved.json").read_text())
"""Settings that old releases read, by release and checkpoint, as record_resolved.py prints them."""
CASES = [(release, name) for release, entries in RECORDED.items() for name in entries]
NOT_SERVED = {"llava_next_video", "florence2_04rr", "florence2_amd", "florence2_large_ft"}
"""Checkpoints for whose family or layout this test cannot create a configuration."""
_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


def resolved(config: dict[str, Any], tmp_path: Path) -> Any:
    """Return transformers' configuration of the text model, as the family uses it."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path)
    family = family_of(checkpoint)
    read = getattr(transformers, family.module_name).config_class.from_pretrained(tmp_path)
    settle(checkpoint, read, family.default_theta)
    return read.get_text_config()


def old_rope(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert rotary settings of transformers 4 to settings of transformers 5."""
    rope = {"rope_theta": entry["rope_theta"], "rope_type": "default", **(entry.get("rope_scaling") or {})}
    if (fraction := entry.get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = fraction
    if (local := entry.get("rope_local_base_freq")) is not None:
        return {"full_attention": rope, "sliding_attention": {"rope_theta": local, "rope_type": "default"}}
    return rope


def without_old_name(rope: dict[str, Any]) -> dict[str, Any]:
    """Drop `type`, the old name of `rope_type`. transformers stores both."""
    return {key: value for key, value in rope.items() if key != "type"}


@pytest.mark.parametrize(("release", "name"), [case for case in CASES if case[1] not in NOT_SERVED])
def test_a_published_configuration_keeps_its_meaning(release, name, tmp_path):
    entry = RECORDED[release][name]
    text = resolved(json.loads((FOLDER / name / "config.json").read_text()), tmp_path)
    assert without_old_name(text.rope_parameters) == without_old_name(old_rope(entry))
    for key, value in entry.items():
        if key in _ROPE or value is None:
            continue
        found = getattr(text, key)
        assert ("".join(layer[0] for layer in found) if key == "layer_types" else found) == value, key


FUYU = {"model_type": "fuyu", "text_config": {"model_type": "persimmon"}}
LINEAR = {"type": "linear", "factor": 2.0}
NEW_SPELLING = {"model_type": "persimmon", "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}
QWEN3 = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}


@pytest.mark.parametrize(
    ("config", "theta", "fraction"),
    [
        (FUYU, 25_000.0, 0.5),
        (FUYU | {"rope_theta": 25_000.0, "partial_rotary_factor": 0.5}, 25_000.0, 0.5),
        (FUYU | {"rope_theta": 12_345.0}, 12_345.0, 0.5),
        ({"model_type": "fuyu"}, 25_000.0, 0.5),
        ({"model_type": "fuyu", "rope_theta": 777, "partial_rotary_factor": 0.25}, 777.0, 0.25),
        ({**FUYU, "rope_theta": 1.0, "text_config": {"model_type": "persimmon", "rope_theta": 888.0}}, 888.0, 0.5),
        ({**FUYU, "text_config": {"model_type": "persimmon", "hidden_size": 128}}, 25_000.0, 0.5),
        ({**FUYU, "text_config": NEW_SPELLING}, 9.0, 0.5),
        ({**FUYU, "text_config": {"model_type": "persimmon", "rope_scaling": LINEAR}}, 25_000.0, 0.5),
        (QWEN3, 5_000_000.0, None),
        ({"model_type": "qwen3_vl"}, 5_000_000.0, None),
        ({**QWEN3, "text_config": {"model_type": "qwen3_vl_text", "rope_theta": 1_000_000}}, 1_000_000.0, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_rotary_base_is_the_stated_one_or_the_old_default(config, theta, fraction, tmp_path):
    """The rotary base comes from the top level or `text_config`, as `rope_theta` or in `rope_parameters`.

    If config.json has none, the base is the default of transformers 4.
    """
    rope = resolved(config, tmp_path).rope_parameters
    assert rope["rope_theta"] == theta
    assert rope.get("partial_rotary_factor") == fraction


@pytest.mark.parametrize(
    "text",
    [
        {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
    ],
)
@pytest.mark.parametrize(
    ("family", "part"),
    [("llava", "llama"), ("llava_next", "mistral"), ("llava_onevision", "qwen2"), ("idefics3", "llama"),
     ("smolvlm", "llama"), ("internvl", "qwen2"), ("qwen2_audio", "qwen2"), ("deepseek_vl", "llama")],
)  # fmt: skip
def test_old_and_new_spellings_of_rotary_settings_are_equal(family, part, text, tmp_path):
    rope = resolved({"model_type": family, "text_config": {"model_type": part, **text}}, tmp_path).rope_parameters
    assert without_old_name(rope) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}


@pytest.mark.parametrize("spelled", ["type", "rope_type"])
def test_sections_of_three_axes_are_read_in_both_spellings(spelled, tmp_path):
    """The published Qwen2-VL has flat settings. transformers saves a different format today."""
    sections = {spelled: "mrope" if spelled == "type" else "default", "mrope_section": [16, 24, 24]}
    for family in ("qwen2_vl", "qwen2_5_vl"):
        rope = resolved({"model_type": family, "rope_theta": 7.0, "rope_scaling": sections}, tmp_path).rope_parameters
        assert (rope["rope_theta"], rope["mrope_section"], rope["rope_type"]) == (7.0, [16, 24, 24], "default")


def test_rotary_settings_of_layers_are_not_mixed_with_settings_of_all(tmp_path):
    flat = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}
    with pytest.raises(UnsupportedCheckpoint, match="rope_parameters has factor, rope_theta, rope_type for all layers"):
        resolved({"model_type": "gemma3", "text_config": {"rope_parameters": flat}}, tmp_path)
    layers = {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}
    assert (
        resolved({"model_type": "gemma3", "text_config": {"rope_parameters": layers}}, tmp_path).rope_parameters
        == layers
    )
    old = {"rope_theta": 777.0, "rope_local_base_freq": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert resolved({"model_type": "gemma3", "text_config": old}, tmp_path).rope_parameters == layers


def test_embeddings_are_tied_by_the_text_models_settings(random_checkpoint, tmp_path):
    """The head is tied if text_config says so, as in transformers 4.

    transformers 5 ignores this setting in text_config and reports that the weights of the head are missing.
    """
    from safetensors.torch import load_file, save_file

    for file in random_checkpoint.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(random_checkpoint / "model.safetensors")
    head = next(name for name in weights if name.endswith("lm_head.weight"))
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    del weights[head]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, device="cpu")
    assert torch.equal(model.lm_head.weight.float(), weights[embedding].float())
