"""Tests for HunyuanOCR against transformers, on random weights."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from safetensors.torch import load_file
from transformers import HunYuanVLConfig, HunYuanVLForConditionalGeneration

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import changed, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

# isort: split
from transformers.models.hunyuan_vl.image_processing_hunyuan_vl import HunYuanVLImageProcessor
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

START, END, IMAGE = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 101, 102))
TOKENS = ("<｜hy_begin▁of▁sentence｜>", "<｜hy_end▁of▁sentence｜>", "<｜hy_▁pad▁｜>", START, END, IMAGE)
IMAGES = {
    "image_processor_type": "HunYuanVLImageProcessor",
    "min_pixels": 6000,
    "max_pixels": 64_000,
    "patch_size": 16,
    "resample": 1,  # as published, but the reference ignores this key
    "temporal_patch_size": 1,
    "merge_size": 2,
}
# Keys of tencent/HunyuanOCR, with smaller sizes.
TEXT = {
    "vocab_size": 400,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.1,
    "rope_parameters": {
        "alpha": 1000.0,
        "factor": 1.0,
        "rope_theta": 10000.0,
        "rope_type": "xdrope",
        "type": "xdrope",
        "xdrope_section": [4, 4, 4, 4],
    },
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "out_hidden_size": 48,
    "patch_size": 16,
    "max_image_size": 128,
    "initializer_range": 0.2,
}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": START + IMAGE + END}
    model_class = HunYuanVLForConditionalGeneration
    processor_class = HunYuanVLProcessor
    parts = (HunYuanVLImageProcessor, AutoTokenizer)


class TestHunYuanVL(ExtremeShapes, FamilyContract):
    name = "hunyuan_vl"
    reference_class = Reference
    prompts: ClassVar = {**IMAGE_PROMPTS, "two images": [*IMAGE_PROMPTS["two images"][:2], {"image": noise(170, 260)}]}

    @classmethod
    def write_checkpoint(cls, out):
        ids = save_tokenizer(
            out,
            TOKENS,
            bos_token=TOKENS[0],
            eos_token=TOKENS[1],
            pad_token=TOKENS[2],
            extra_special_tokens={"image_start_token": START, "image_end_token": END, "image_token": IMAGE},
        ).convert_tokens_to_ids
        config = {
            "architectures": ["HunYuanVLForConditionalGeneration"],
            "model_type": "hunyuan_vl",
            "tie_word_embeddings": True,
            "image_token_id": ids(IMAGE),
            "image_start_token_id": ids(START),
            "image_end_token_id": ids(END),
            "image_newline_token_id": 399,
            "text_config": {**TEXT, "model_type": "hunyuan_vl_text"},
            "vision_config": {**VISION, "model_type": "hunyuan_vl_vision"},
        }
        save_json(out, preprocessor_config=IMAGES, processor_config={"cat_extra_token": True}, config=config)
        read = HunYuanVLConfig.from_pretrained(out)
        save_model(out, HunYuanVLForConditionalGeneration, read, ids(TOKENS[1]), ids(TOKENS[2]))
        save_json(out, config=config)

    def test_published_weights_have_their_own_names(self, path, reference, path_file, tmp_path):
        """The first HunyuanOCR has a flat config.json, and layers with other names."""
        out = changed(path, tmp_path / "other", "generation_config", {})
        config = json.loads((path / "config.json").read_text())
        rope = config["text_config"].pop("rope_parameters")
        flat = {**config.pop("text_config"), **config, "rope_scaling": rope, "rope_theta": rope.pop("rope_theta")}
        del rope["rope_type"]
        for name in ("start", "end", "newline"):
            flat[f"im_{name}_id"] = flat.pop(f"image_{name}_token_id")
        save_json(out, config=flat)
        weights = load_file(path / "model.safetensors")
        assert {"vit.layers.0.mlp.dense_h_to_4h.weight", "vit.perceive.proj.0.weight"} <= weights.keys()
        assert "model.layers.0.self_attn.query_layernorm.weight" in weights
        self.assert_same(out, reference, path_file)

    def test_an_elongated_image_is_refused(self, processor):
        pixels = noise(20, 4020)
        with pytest.raises(LimitExceeded, match=r"4020x20 pixels.*at most 200 times"):
            processor.plan(Media("image", pixels), pixels, {"image": 1})

    def test_fewer_than_three_axes_are_refused(self, path, tmp_path):
        rope = {**TEXT["rope_parameters"], "xdrope_section": [8, 8]}
        out = changed(path, tmp_path / "other", "config", {"text_config": {**TEXT, "rope_parameters": rope}})
        self.assert_refused(out, r"xdrope_section=\[8, 8\] must have at least 3 numbers")

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"temporal_patch_size": 2}, "temporal_patch_size is 2, but the tower .* takes 1"),
            ("preprocessor_config", {"patch_size": 14}, "patch_size is 14, but the tower"),
            ("preprocessor_config", {"do_resize": False}, "do_resize"),
            ("processor_config", {"cat_extra_token": False}, "cat_extra_token is False; only True"),
            ("config", {"use_qk_norm": False}, "use_qk_norm is False; only True"),
        ]
    )
