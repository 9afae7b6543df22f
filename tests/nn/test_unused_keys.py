"""Tests for the warning about keys in config.json that have no effect."""

import json
import logging
import shutil

import pytest
from transformers import FuyuConfig, LlavaConfig, Qwen2VLConfig

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.unused_keys import unused_keys
from tests.models.small_checkpoints import changed

LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "image_token_index": 7,
    "text_config": {"model_type": "llama", "hidden_size": 64, "rope_theta": 5e5, "_name_or_path": "x", "top_k": 50},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 4},
}
FLAT = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "use_sliding_window": False,
    "vision_config": {"embed_dim": 32, "in_channels": 3},
}


@pytest.mark.parametrize(("cls", "config"), [(LlavaConfig, LLAVA), (Qwen2VLConfig, FLAT)], ids=["sections", "flat"])
def test_keys_that_are_read_or_translated_are_not_listed(cls, config):
    assert unused_keys(config, cls.from_dict) == []
    assert unused_keys(config, cls.from_dict) == []  # a second call detects whether the first changed its argument


def test_unused_keys_of_every_section_are_listed():
    other = json.loads(json.dumps(LLAVA))
    other["vision_config"]["in_chans"] = 3
    other["text_config"]["rope_tetha"] = None
    other["projector"] = {"hidden_act": "gelu"}
    assert unused_keys(other, LlavaConfig.from_dict) == [
        "text_config.rope_tetha",
        "vision_config.in_chans",
        "projector",
    ]


def test_a_key_at_the_top_level_is_listed_unless_a_section_has_the_same_value():
    config = {"model_type": "fuyu", "hidden_size": 64, "text_config": {"model_type": "persimmon", "hidden_size": 64}}
    assert unused_keys(config, FuyuConfig.from_dict) == []
    assert unused_keys(config | {"hidden_size": 32}, FuyuConfig.from_dict) == ["hidden_size"]


def key_warnings(caplog):
    return [record.getMessage() for record in caplog.records if "keys" in record.getMessage()]


def test_unused_keys_are_logged_once_in_one_line(random_checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load_model(random_checkpoint, "cpu", "float32")
        assert key_warnings(caplog) == []
        other = changed(random_checkpoint, tmp_path / "other", "config", {f"key_{i}": i for i in range(20)})
        load_model(other, "cpu", "float32")
    names = ", ".join(f"key_{i}" for i in range(12))
    assert key_warnings(caplog) == [
        f"{other}: config.json has keys that the family qwen2_vl does not use: {names}, and 8 more"
    ]


@pytest.mark.parametrize("stated", ["w8a8", "w4a16", "w8a8s"])
def test_weights_that_are_quantized_for_mindie_need_their_description(stated, random_checkpoint, tmp_path):
    other = changed(random_checkpoint, tmp_path / "other", "config", {"quantize": stated})
    with pytest.raises(UnsupportedCheckpoint, match=f"quantize is '{stated}' in config.json, but there is no"):
        load_model(other, "cpu")


def test_a_description_without_quantized_weights_is_refused(random_checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(random_checkpoint, other)
    (other / "quant_model_description_w8a8.json").write_text("{}")
    (other / "model.safetensors").rename(other / "quant_model_weight_w8a8.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="'modelslim', but none of its weights is quantized"):
        load_model(other, "cpu")


def test_a_float_checkpoint_for_mindie_is_accepted(random_checkpoint, tmp_path):
    other = changed(random_checkpoint, tmp_path / "other", "config", {"quantize": "float"})
    assert Checkpoint.open(other).config["quantize"] == "float"
    load_model(other, "cpu")
