"""Tests for Pixtral against transformers, on random weights."""

from __future__ import annotations

import shutil

from transformers import LlavaForConditionalGeneration

from mindie_mm.models import family_named, family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from tests.models.contract import refusals
from tests.models.small_checkpoints import save_json
from tests.models.test_mistral3 import PIXELS, TEXT_CONFIG, TOKENS, VISION_CONFIG, PixtralContract, Reference, write


class PixtralReference(Reference):
    model_class = LlavaForConditionalGeneration


class TestPixtral(PixtralContract):
    name = "pixtral"
    reference_class = PixtralReference

    @classmethod
    def write_checkpoint(cls, out, **settings):
        # Keys of mistral-community/pixtral-12b, with smaller sizes.
        config = {
            "architectures": ["LlavaForConditionalGeneration"],
            "ignore_index": -100,
            "image_seq_length": 1,
            "image_token_index": TOKENS.index("[IMG]"),
            "model_type": "llava",
            "projector_hidden_act": "gelu",
            "text_config": {**TEXT_CONFIG, "is_composition": True},
            "torch_dtype": "float32",
            "vision_config": {**VISION_CONFIG, "image_size": 128, "is_composition": True, "patch_size": 16},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
            **settings,
        }
        pixels = {**PIXELS, "patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 128}}
        stated = {"image_token": "[IMG]", "patch_size": 16, "processor_class": "PixtralProcessor"}
        write(out, config, LlavaForConditionalGeneration, pixels, stated)

    def test_states_of_several_layers_are_joined(self, tmp_path, path_file):
        self.write_checkpoint(tmp_path, vision_feature_layer=[0, -1])
        self.prompts = {"two images": self.prompts["two images"]}
        self.assert_same(tmp_path, PixtralReference(tmp_path), path_file)

    def test_the_tower_distinguishes_the_family_from_llava(self, path, tmp_path):
        out = shutil.copytree(path, tmp_path / "other")
        save_json(out, config={"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}})
        assert family_of(Checkpoint.open(out)) is family_named("llava")

    test_unsupported_settings_are_refused_by_name = refusals(
        [("config", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'")]
    )
