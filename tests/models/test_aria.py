"""Tests for Aria against transformers, on random weights."""

from __future__ import annotations

from typing import ClassVar

import pytest
from PIL import Image
from transformers import AriaConfig, AriaForConditionalGeneration, AriaImageProcessor, AriaProcessor

from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|img|>", "<fim_prefix>", "<fim_suffix>")
EXPERTS = {"intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2}
TOWER = {**VISION, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70}
PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "AriaImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": 490,
    "min_image_size": 336,
    "processor_class": "AriaProcessor",
    "split_image": False,
}
STATED = {"size_conversion": {"490": 3, "980": 7}}


def write(out, pixels=PIXELS, **settings):
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = save_tokenizer(out, TOKENS, extra_special_tokens={"image_token": "<|img|>"}, **special)
    ids = tokenizer.convert_tokens_to_ids
    config = AriaConfig(
        vision_config=TOWER,
        text_config={**TEXT, **EXPERTS, "pad_token_id": ids("<pad>")},
        projector_patch_to_query_dict={"49": 3, "196": 7},
        image_token_index=ids("<|img|>"),
        initializer_range=0.2,
        **settings,
    )
    save_model(out, AriaForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config=STATED)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<|img|>"}
    model_class = AriaForConditionalGeneration
    processor_class = AriaProcessor
    parts = (AriaImageProcessor, AutoTokenizer)

    def inputs(self, items):
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        own = self.processor.image_processor
        # Without these arguments, the reference uses neither setting of preprocessor_config.json.
        settings = {"max_image_size": own.max_image_size, "split_image": own.split_image}
        given = {"images": images, "images_kwargs": settings} if images else {}
        return self.processor(text=[self.text(items)], return_tensors="pt", **given)


class TestAria(ExtremeShapes, FamilyContract):
    name = "aria"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {**IMAGE_PROMPTS, "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}]}
    chooses_experts = True

    @pytest.mark.parametrize(
        ("name", "settings", "pixels"),
        [
            ("a long image", {}, {"split_image": True}),
            (
                "one image",
                {"vision_feature_layer": -2},
                {"split_image": True, "max_image_size": 980, "min_image_size": 700},
            ),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, name, settings, pixels, tmp_path, path_file):
        """The reference writes as many placeholders for each image as the image with the most tiles needs."""
        write(tmp_path, {**PIXELS, **pixels}, **settings)
        self.prompts = {name: IMAGE_PROMPTS[name]}
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_the_worst_case_needs_an_attention_mask(self, processor):
        height, width, _ = processor.worst_case("image").shape
        assert any(size != (processor.side, processor.side) for size in processor.shown(height, width))

    def test_embeddings_with_other_numbers_of_features_are_refused(self, processor):
        assert processor.spelling("image", 4, ()) is None
        assert processor.spelling("image", 6, ()) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"vision_feature_layer": [0, -1]}, "vision_feature_layer=.* must be a single number"),
            ("config", {"projector_patch_to_query_dict": {"100": 3}}, "has 49 patches, .* only entries for 100"),
            ("processor_config", {"size_conversion": {"490": 128}}, "490 is 128; only 3"),
            ("preprocessor_config", {"max_image_size": 448}, "max_image_size is 448 .* must be 490 or 980"),
            ("preprocessor_config", {"min_image_size": 500}, "min_image_size 500; .* at most as large"),
            ("preprocessor_config", {"image_processor_type": "AriaVisionProcessor"}, "AriaVisionProcessor"),
        ]
    )
