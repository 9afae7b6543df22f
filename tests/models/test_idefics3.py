"""Tests for Idefics3 against transformers, on random weights."""

from typing import ClassVar

import pytest
import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlamaConfig,
)
from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size

from mindie_mm.models._idefics import resized
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = (
    "<s>",
    "<pad>",
    "</s>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *TAGS,
)
PIXELS = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
FEATURES = 4


def write(out, pixels=PIXELS, features=FEATURES, **settings):
    tokenizer = save_tokenizer(out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = tokenizer.convert_tokens_to_ids
    config = Idefics3Config(
        vision_config=VISION, text_config=LlamaConfig(**TEXT), image_token_id=ids("<image>"), **settings
    )
    save_model(out, Idefics3ForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config={"image_seq_len": features})


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = Idefics3ForConditionalGeneration
    processor_class = Idefics3Processor
    parts = (Idefics3ImageProcessor, AutoTokenizer)


PROMPTS = {
    **IMAGE_PROMPTS,
    "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}],
}


class TestIdefics3(ExtremeShapes, FamilyContract):
    name = "idefics3"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = PROMPTS

    @pytest.mark.parametrize("side", [112, 27, 5000])
    def test_sizes_equal_the_references(self, side):
        for height in range(1, 300, 7):
            for width in range(1, 300, 5):
                expected = get_resize_output_image_size(torch.empty(3, height, width, device="meta"), side)
                assert resized(height, width, side) == expected

    @pytest.mark.parametrize(
        ("settings", "pixels", "features"),
        [
            ({}, {"do_image_splitting": False, "do_pad": False}, 4),
            ({"scale_factor": 4}, {"size": {"longest_edge": 28}, "resample": 2}, 1),
            ({"scale_factor": 1}, {"max_image_size": {"longest_edge": 56}, "image_mean": [0.1, 0.2, 0.3]}, 64),
            ({}, {"size": {"height": 30, "width": 80}, "do_normalize": False}, 4),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, settings, pixels, features, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, features, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_embeddings_whose_grid_does_not_fit_are_refused(self, processor):
        assert processor.spelling("image", 4, (1, 1)) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"scale_factor": 3}, r"positive multiple of scale_factor \(3\)"),
            ("config", {"image_token_id": 2}, "image_token_id is 2"),
            ("processor_config", {"image_seq_len": 16}, "image_seq_len is 16"),
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"size": {"shortest_edge": 28}}, "size="),
            ("preprocessor_config", {"max_image_size": {"height": 28}}, "max_image_size="),
            ("preprocessor_config", {"image_processor_type": "Idefics2ImageProcessor"}, "Idefics2ImageProcessor"),
        ]
    )
