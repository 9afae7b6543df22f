"""Tests for DeepSeek-VL against transformers, on random weights."""

from typing import ClassVar

from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLImageProcessor,
    DeepseekVLProcessor,
    LlamaConfig,
    SiglipVisionConfig,
)

from tests.models.contract import IMAGE_PROMPTS, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<image_placeholder>")
PIXELS = {"size": {"height": 28, "width": 28}, "min_size": 3, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3}
FEATURES = 16


def save_special(out):
    return save_tokenizer(
        out,
        SPECIAL,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image_placeholder>"},
    )


def write(out, pixels=PIXELS, **settings):
    ids = save_special(out).convert_tokens_to_ids
    config = DeepseekVLConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=LlamaConfig(**TEXT),
        image_token_id=ids("<image_placeholder>"),
        **settings,
    )
    save_model(out, DeepseekVLForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config={"num_image_tokens": FEATURES})


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image_placeholder>"}
    model_class = DeepseekVLForConditionalGeneration
    processor_class = DeepseekVLProcessor
    parts = (DeepseekVLImageProcessor, AutoTokenizer)


class TestDeepseekVL(FamilyContract):
    name = "deepseek_vl"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "a line": [{"image": noise(500, 1)}, {"text": "Where?"}],
    }

    def test_logits_under_other_settings_equal_the_references(self, tmp_path, path_file):
        write(tmp_path, {**PIXELS, "resample": 2, "do_normalize": False, "min_size": 9}, tie_word_embeddings=False)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
            ("processor_config", {"num_image_tokens": 17}, "num_image_tokens is 17"),
            ("preprocessor_config", {"do_pad": False}, "do_pad is False"),
            ("preprocessor_config", {"size": {"height": 28, "width": 56}}, "size is"),
            ("preprocessor_config", {"min_size": 30}, "min_size is 30"),
            ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ]
    )
