"""Tests for LLaVA against transformers, on random weights."""

from typing import ClassVar

import pytest
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaProcessor,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.models import load_model
from tests.lora_samples import linear_names, write_adapter
from tests.models.contract import IMAGE_PROMPTS, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<image>")
PIXELS = {
    "image_processor_type": "LlavaImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
STATED = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def write(out, pixels=PIXELS, stated=STATED, vision=None, **settings):
    tokenizer = save_tokenizer(out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = tokenizer.convert_tokens_to_ids
    config = LlavaConfig(
        vision_config=vision or CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_index=ids("<image>"),
        **settings,
    )
    save_model(out, LlavaForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config=stated)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = LlavaForConditionalGeneration
    processor_class = LlavaProcessor
    parts = (LlavaImageProcessor, AutoTokenizer)


class SiglipReference(Reference):
    parts = (SiglipImageProcessor, AutoTokenizer)


PROMPTS = {
    **IMAGE_PROMPTS,
    "an image of the size": [{"image": noise(28, 28)}],
}


class TestLlava(FamilyContract):
    name = "llava"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = PROMPTS

    def test_adapters_of_older_releases_change_the_same_layers(self, path, tmp_path):
        """The names q_proj, k_proj and v_proj, as in most adapters for LLaVA, also exist in CLIP's tower."""
        plain, model = (load_model(path, "cpu", "float32", prepares=prepares) for prepares in (False, True))
        loras = model.enable_loras(2, 8)
        names = [name for name in linear_names(plain.module) if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
        old = (r"^model\.language_model\.", "language_model.model."), (r"^model\.vision_tower\.", "vision_tower.")
        folders = [
            write_adapter(tmp_path / str(number), plain.module, names, rename=rename)
            for number, rename in enumerate([(), old])
        ]
        one, two = ({id(change.target): change for change in loras.read(folder).changes} for folder in folders)
        assert len(one) == len(names)
        assert one.keys() == two.keys()
        assert {change.target.in_text for change in one.values()} == {True, False}

    @pytest.mark.parametrize(
        ("settings", "pixels", "stated"),
        [
            ({"vision_feature_layer": [-1, 1, 2]}, {}, {}),
            (
                {"vision_feature_layer": 2, "vision_feature_select_strategy": "full"},
                {},
                {"vision_feature_select_strategy": "full"},
            ),
            ({"multimodal_projector_bias": False}, {"do_pad": True}, {}),
            ({"projector_hidden_act": "relu"}, {"do_center_crop": False, "size": {"height": 28, "width": 28}}, {}),
            ({}, {"size": {"shortest_edge": 20, "longest_edge": 35}, "resample": 2, "do_rescale": False}, {}),
            ({}, {"size": {"shortest_edge": 20}, "do_normalize": False}, {}),
            ({}, {"size": 30, "crop_size": 28, "do_normalize": False, "do_rescale": False, "do_pad": None}, {}),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, settings, pixels, stated, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, {**STATED, **stated}, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_a_siglip_tower_is_served(self, tmp_path, path_file):
        pixels = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 28, "width": 28}}
        stated = {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
        vision = SiglipVisionConfig(**VISION, vision_use_head=False)
        write(tmp_path, pixels, stated, vision, vision_feature_select_strategy="full")
        self.assert_same(tmp_path, SiglipReference(tmp_path), path_file)

    def test_an_image_that_would_become_enormous_is_refused(self, processor):
        line = noise(1, 300_000)
        with pytest.raises(LimitExceeded, match="resized to 8400000x28"):
            processor.plan(Media("image", line), line, {})

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"resample": 0}, "resample is 0"),
            ("preprocessor_config", {"size": {"max_height": 28, "max_width": 28}}, "max_height"),
            ("preprocessor_config", {"crop_size": {"height": 14, "width": 28}}, r"images are resized to \(14, 28\)"),
            ("preprocessor_config", {"do_center_crop": False}, "several sizes"),
            ("preprocessor_config", {"image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor"),
            ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor", "do_pad": True}, "do_pad is True"),
            ("processor_config", {"patch_size": 14}, "patch_size is 14"),
            ("processor_config", {"num_additional_image_tokens": 0}, "num_additional_image_tokens is 0"),
            ("config", {"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type is 'pixtral'"),
            ("config", {"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ]
    )
