"""Tests for Mistral 3 against transformers, on random weights."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import (
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Media
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
# Keys of mistralai/Mistral-Small-3.1-24B-Instruct-2503, with smaller sizes.
TEXT_CONFIG = {
    **TEXT,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
    "use_cache": True,
}
VISION_CONFIG = {
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "image_size": 168,
    "initializer_range": 0.2,
    "intermediate_size": 64,
    "model_type": "pixtral",
    "num_attention_heads": 4,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
CONFIG = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "torch_dtype": "float32",
    "vision_feature_layer": -1,
}
PIXELS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": {"height": 14, "width": 14},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 168},
}
STATED = {
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "image_token": "[IMG]",
    "patch_size": 14,
    "processor_class": "PixtralProcessor",
    "spatial_merge_size": 2,
}
# The text configuration of mistralai/Ministral-3-3B-Instruct-2512, with smaller sizes.
MINISTRAL = {
    **TEXT_CONFIG,
    "model_type": "ministral3",
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
}
del MINISTRAL["rope_theta"]


def write(out, config, cls, pixels=PIXELS, stated=STATED):
    tokenizer = save_tokenizer(out, TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    ids = tokenizer.convert_tokens_to_ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(out)
    save_json(out, preprocessor_config=pixels, processor_config=stated, config=config)
    save_model(out, cls, cls.config_class.from_pretrained(out), ids("</s>"), ids("<pad>"))
    save_json(out, config=config)


def mistral3(text=None, vision=None, **settings):
    parts = {"text_config": {**TEXT_CONFIG, **(text or {})}, "vision_config": {**VISION_CONFIG, **(vision or {})}}
    return {**CONFIG, "tie_word_embeddings": False, **parts, "image_token_index": TOKENS.index("[IMG]"), **settings}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "[IMG]"}
    model_class = Mistral3ForConditionalGeneration
    processor_class = PixtralProcessor
    parts = (PixtralImageProcessor, AutoTokenizer)


class PixtralContract(ExtremeShapes, FamilyContract):
    """Tests for both families."""

    prompts: ClassVar = {**IMAGE_PROMPTS, "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}]}

    def test_an_image_of_one_row_of_pixels_is_refused(self, processor):
        line = noise(1, 2000)
        with pytest.raises(LimitExceeded, match="2000x1 pixels; one side would have no pixels"):
            processor.plan(Media("image", line), line, {"image": 1})

    def test_a_tokenizer_without_tokenizer_json_is_refused_with_advice(self, path, tmp_path):
        out = shutil.copytree(path, tmp_path / "other")
        (out / "tokenizer.json").rename(out / "tekken.json")
        with pytest.raises(UnsupportedCheckpoint, match=r"tekken\.json.* tokenizer\.json"):
            Tokenizer.from_pretrained(out)


class TestMistral3(PixtralContract):
    name = "mistral3"
    reference_class = Reference

    @classmethod
    def write_checkpoint(cls, out):
        write(out, mistral3(), Mistral3ForConditionalGeneration)

    @pytest.mark.parametrize(
        ("settings", "pixels"),
        [
            ({"text": {**MINISTRAL, "sliding_window": 12}, "vision_feature_layer": -2}, {"do_normalize": False}),
            (
                {"vision_feature_layer": 1, "multimodal_projector_bias": True, "tie_word_embeddings": True},
                {"size": {"height": 70, "width": 168}, "resample": 2},
            ),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, settings, pixels, tmp_path, path_file):
        write(tmp_path, mistral3(**settings), Mistral3ForConditionalGeneration, {**PIXELS, **pixels})
        self.prompts = {"two images": IMAGE_PROMPTS["two images"]}
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_a_head_of_its_own_is_read_although_config_json_does_not_state_it(
        self, path, reference, path_file, tmp_path
    ):
        """Transformers ties the head to the embeddings by default, but the published weights have both."""
        out = shutil.copytree(path, tmp_path / "other")
        config = mistral3()
        del config["tie_word_embeddings"]
        save_json(out, config=config)
        self.prompts = {"text": IMAGE_PROMPTS["text"]}
        self.assert_same(out, reference, path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_token_index": 2}, "image_token_index is 2, but .* is 6"),
            ("config", {"vision_config": {"model_type": "clip_vision_model"}}, "model_type is 'clip_vision_model'"),
            ("config", {"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
            ("config", {"vision_feature_layer": [0, -1]}, "vision_feature_layer=.* must be a single number"),
            ("config", {"spatial_merge_size": 1}, "spatial_merge_size is 2; only 1"),
            ("processor_config", {"patch_size": 16}, "patch_size is 16; only 14"),
            ("processor_config", {"image_token": "[PIC]"}, r"no added token \[PIC\]"),
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"do_center_crop": True}, "do_center_crop is True"),
            ("preprocessor_config", {"size": {"shortest_edge": 168}}, "must have longest_edge, or height and width"),
            ("preprocessor_config", {"resample": 0}, "resample is 0"),
        ]
    )
