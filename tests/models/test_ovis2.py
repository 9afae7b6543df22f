"""Tests for Ovis2 against transformers, on random weights."""

from typing import ClassVar

import pytest
from transformers import Ovis2Config, Ovis2ForConditionalGeneration, Ovis2ImageProcessor, Ovis2Processor
from transformers.models.ovis2.image_processing_ovis2 import get_min_tile_covering_grid

from mindie_mm.models._ovis2_tiles import covering_grid
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_ATOM>", *INDICATORS)
PIXELS = {
    "image_processor_type": "Ovis2ImageProcessor",
    "crop_to_patches": True,
    "max_patches": 6,
    "size": {"height": 32, "width": 32},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "hidden_stride": 2,
    "vocab_size": 60,
    "initializer_range": 0.2,
}
FEATURES = 16
"""Number of features of a tile. 2x2 of its 8x8 patches are a feature."""


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = Ovis2ForConditionalGeneration
    processor_class = Ovis2Processor
    parts = (Ovis2ImageProcessor, AutoTokenizer)


def write(out, pixels=PIXELS, vision=VISION, features=FEATURES):
    tokenizer = save_tokenizer(out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = tokenizer.convert_tokens_to_ids
    config = Ovis2Config(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=ids("<IMG_ATOM>"),
        visual_indicator_token_ids=ids([*INDICATORS]),
        hidden_size=TEXT["hidden_size"],
        vocab_size=TEXT["vocab_size"],
        initializer_range=0.2,
    )
    save_model(out, Ovis2ForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))
    save_json(out, preprocessor_config=pixels, processor_config={"image_seq_length": features})


class TestOvis2(ExtremeShapes, FamilyContract):
    name = "ovis2"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = IMAGE_PROMPTS

    @pytest.mark.parametrize(("side", "most"), [(32, 6), (448, 12), (100, 9)])
    def test_grids_equal_the_references(self, side, most):
        for height in range(1, 1200, 97):
            for width in range(1, 1200, 61):
                expected = get_min_tile_covering_grid((height, width), side, most)
                assert covering_grid(height, width, side, most) == expected, (height, width)

    @pytest.mark.parametrize(
        ("pixels", "vision", "features"),
        [
            ({"use_covering_area_grid": False, "min_patches": 2}, {"hidden_stride": 1}, 64),
            (
                {"crop_to_patches": False, "do_normalize": False},
                {"tokenize_function": "st_argmax", "qkv_bias": True},
                16,
            ),
        ],
        ids=["nearest grid", "no tiles"],
    )
    def test_logits_under_other_settings_equal_the_references(self, pixels, vision, features, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, {**VISION, **vision}, features)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_embeddings_whose_grid_does_not_fit_are_refused(self, processor):
        assert processor.spelling("image", FEATURES, (1, 2)) is None

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"size": {"height": 32, "width": 64}}, "images are resized to"),
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"do_center_crop": True}, "do_center_crop is True"),
            ("processor_config", {"image_seq_length": 4}, "image_seq_length is 4"),
            ("config", {"image_token_id": 7}, r"image_token_id and visual_indicator_token_ids are \(7, "),
            ("config", {"vision_config": {**VISION, "tokenize_function": "gumbel_argmax"}}, "'gumbel_argmax'"),
            ("config", {"vision_config": {**VISION, "num_visual_indicator_tokens": 4}}, "num_visual_indicator_tokens"),
            ("config", {"vision_config": {**VISION, "hidden_stride": 3}}, "does not divide the 8x8 patches"),
            ("config", {"vision_config": {**VISION, "image_size": [32, 32]}}, "only one number each"),
        ]
    )
