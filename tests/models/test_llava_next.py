"""Tests for LLaVA-NeXT against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    SiglipVisionConfig,
)

from mindie_mm.errors import InputError
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.mindie_contract import MindIEContract
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, changed, save_json, save_model, save_tokenizer
from tests.models.test_llava import PIXELS, SPECIAL, STATED
from tests.transformers_reference import AutoTokenizer

PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
TILES = {**PIXELS, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS}


def write(out, pixels=TILES, stated=STATED, vision=None, **settings):
    tokenizer = save_tokenizer(out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = tokenizer.convert_tokens_to_ids
    config = LlavaNextConfig(
        vision_config=vision or CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_index=ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        **settings,
    )
    save_model(out, LlavaNextForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config=stated)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = LlavaNextForConditionalGeneration
    processor_class = LlavaNextProcessor
    parts = (LlavaNextImageProcessor, AutoTokenizer)


class TestLlavaNext(MindIEContract, ExtremeShapes, FamilyContract):
    name = "llava_next"
    mindie_layout = "llava_next"
    mindie_prompts = (
        [{"text": "Look: "}, {"image": noise(40, 61)}, {"text": " and "}, {"image": noise(300, 280)}],
        [{"image": noise(56, 56)}],
    )
    mindie_tolerance = 0.02  # of float16 pixels
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}],
        "an image of a canvas": [{"image": noise(56, 56)}],
        "a line, of which nothing is left on any canvas": [{"image": noise(1, 1100)}, {"text": "Where?"}],
        "of every shape": [{"image": noise(29 + 13 * i, 100 - 11 * i)} for i in range(7)],
    }

    def mindie_arrays(self, prompt, items, model, ids):
        return [
            array
            for item in items
            for array in (
                model.normalized(item).cpu().numpy().astype(np.float16)[np.newaxis],
                np.array([1, *item.shape.grid, item.shape.num_features]),
            )
        ]

    def test_proportions_that_mindie_miscounts_are_refused(self, mindie, path_file):
        """MindIE exchanges the rows and columns of a canvas that is not square."""
        with pytest.raises(InputError, match=r"media item 1 \(image\): MindIE's workers cannot read this image"):
            mindie.tokenize([{"image": noise(56, 56)}, {"image": noise(40, 100)}], path_file)
        assert not path_file.exists()

    @pytest.mark.parametrize(
        ("settings", "pixels", "stated", "tower"),
        [
            ({"vision_feature_layer": [-1, 1]}, {"size": {"height": 28, "width": 28}, "resample": 1}, {}, "clip"),
            ({}, {"do_resize": False, "do_center_crop": False, "do_normalize": False}, {}, "clip"),
            (
                {"vision_feature_select_strategy": "full"},
                {},
                {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
                "siglip",
            ),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(
        self, settings, pixels, stated, tower, tmp_path, path_file
    ):
        vision = SiglipVisionConfig(**VISION, vision_use_head=False) if tower == "siglip" else None
        write(tmp_path, {**TILES, **pixels}, {**STATED, **stated}, vision, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
            ("preprocessor_config", {"size": {"shortest_edge": 56}}, "size is"),
            ("preprocessor_config", {"crop_size": {"height": 56, "width": 56}}, "crop_size is"),
            ("preprocessor_config", {"image_grid_pinpoints": PINPOINTS[:2]}, "image_grid_pinpoints is"),
            ("config", {"vision_feature_select_strategy": "full"}, "gives 17 tokens per tile"),
        ]
    )

    def test_a_canvas_that_is_no_whole_number_of_tiles_is_refused(self, path, tmp_path):
        canvases = {"image_grid_pinpoints": [[28, 30]]}
        other = changed(path, tmp_path / "first", "config", canvases)
        self.assert_refused(
            changed(other, tmp_path / "other", "preprocessor_config", canvases), "not a multiple of the tile size"
        )
