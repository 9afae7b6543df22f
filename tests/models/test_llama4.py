"""Tests for Llama 4 against transformers, on random weights."""

from __future__ import annotations

import itertools
import json
from typing import ClassVar

import pytest
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4ImageProcessor, Llama4Processor
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import (
    find_supported_resolutions,
    get_best_fit,
    get_max_res_without_distortion,
)

from mindie_mm.models.llama4 import _best_canvas, _canvases, _fitted
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, changed, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
TEXT_CONFIG = {
    **TEXT,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 128,
    "attn_scale": 0.5,
    "floor_scale": 20,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 7,
    "initializer_range": 0.2,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
    "rope_theta": 10000,
}
PIXELS = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "size": {"height": 56, "width": 56},
}


def write(out, pixels=PIXELS, text=None, **settings):
    special = {"bos_token": TOKENS[0], "eos_token": "<|eot|>", "pad_token": TOKENS[3]}
    tokenizer = save_tokenizer(out, TOKENS, **special)
    ids = tokenizer.convert_tokens_to_ids
    config = Llama4Config(
        vision_config=VISION,
        text_config={**TEXT_CONFIG, "bos_token_id": 0, "pad_token_id": 3, **(text or {})},
        boi_token_index=ids("<|image_start|>"),
        eoi_token_index=ids("<|image_end|>"),
        image_token_index=ids("<|patch|>"),
        **settings,
    )
    save_model(out, Llama4ForConditionalGeneration, config, ids("<|eot|>"), ids(TOKENS[3]))
    save_json(out, preprocessor_config=pixels, processor_config={"patch_size": 7})


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<|image|>"}
    model_class = Llama4ForConditionalGeneration
    processor_class = Llama4Processor
    parts = (Llama4ImageProcessor, AutoTokenizer)

    def inputs(self, items):
        found = super().inputs(items)
        if "pixel_values" in found:  # the processor returns bfloat16
            found["pixel_values"] = found["pixel_values"].float()
        return found


class TestLlama4(ExtremeShapes, FamilyContract):
    name = "llama4"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {**IMAGE_PROMPTS, "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}]}
    chooses_experts = True

    @pytest.mark.parametrize(
        ("text", "pixels"),
        [
            (
                {"use_qk_norm": False, "num_experts_per_tok": 2, "moe_layers": [0, 2], "rope_scaling": None},
                {"resize_to_max_canvas": True},
            ),
            (
                {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 0], "moe_layers": []},
                {"max_patches": 3, "resample": 3, "image_mean": [0.1, 0.2, 0.3]},
            ),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, text, pixels, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, text)
        self.prompts = {"one image": IMAGE_PROMPTS["one image"]}
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    @pytest.mark.parametrize("largest", [False, True])
    def test_sizes_equal_the_references(self, largest):
        side, canvases = 336, find_supported_resolutions(16, SizeDict(height=336, width=336))
        assert _canvases(16, side) == canvases
        sides = *range(1, 3000, 197), 336, 337
        rounded = (248, 155), (23, 276), (195, 120), (1081, 1840)  # sizes for which float32 and float64 differ
        for height, width in (*itertools.product(sides, sides), *rounded):
            expected = get_best_fit((height, width), torch.tensor(canvases), largest)
            assert _best_canvas(height, width, canvases, largest=largest) == tuple(expected.tolist())
            pairs = zip((height, width), expected, strict=True)
            to = [most if largest else min(max(own, side), most) for own, most in pairs]
            fitted = [max(int(one), 1) for one in get_max_res_without_distortion((height, width), to)]
            found = _fitted(height, width, tuple(expected.tolist()), None if largest else side)
            assert [*found] == fitted, (height, width)

    def test_grids_with_too_many_tiles_are_refused(self, processor):
        assert processor.spelling("image", 5 * 16, (2, 2)) is not None
        assert processor.spelling("image", 18 * 16, (1, 17)) is None
        assert processor.spelling("image", 5 * 16, (4, 1, 1)) is None

    def test_the_temperature_may_be_a_number_as_in_published_files(self, path, reference, path_file, tmp_path):
        config = json.loads((path / "config.json").read_text())
        out = changed(
            path, tmp_path / "other", "config", {"text_config": {**config["text_config"], "attn_temperature_tuning": 4}}
        )
        self.prompts = {"text": IMAGE_PROMPTS["text"]}
        self.assert_same(out, reference, path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_token_index": 2}, r"image_token_index is 2, but .* <\|patch\|> is 9"),
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"do_normalize": False}, "do_normalize is False"),
            ("preprocessor_config", {"size": {"height": 28, "width": 28}}, "size is .*28.* only .*56"),
            ("processor_config", {"patch_size": 14}, "patch_size is 14; only 7"),
            ("processor_config", {"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio is 0.25; only 0.5"),
        ]
    )
