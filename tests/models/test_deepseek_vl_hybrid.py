"""Tests for DeepSeek-VL with two towers against transformers, on random weights."""

from typing import ClassVar

from transformers import (
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    DeepseekVLHybridImageProcessor,
    DeepseekVLHybridProcessor,
    LlamaConfig,
    SamVisionConfig,
    SiglipVisionConfig,
)

from tests.models import test_deepseek_vl as plain
from tests.models.contract import FamilyContract, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model
from tests.models.test_deepseek_vl import FEATURES, PIXELS, save_special
from tests.transformers_reference import AutoTokenizer

HIGH = {"high_res_size": {"height": 64, "width": 64}, "high_res_image_mean": [0.1, 0.2, 0.3], "high_res_resample": 1}


class Weighted(DeepseekVLHybridForConditionalGeneration):
    """Model whose weight for the output of SAM's global attention is not 0, the initial value in transformers."""

    def __init__(self, config):
        super().__init__(config)
        self.model.high_res_vision_alpha.data.fill_(0.7)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image_placeholder>"}
    model_class = DeepseekVLHybridForConditionalGeneration
    processor_class = DeepseekVLHybridProcessor
    parts = (DeepseekVLHybridImageProcessor, AutoTokenizer)


class TestDeepseekVLHybrid(FamilyContract):
    name = "deepseek_vl_hybrid"
    reference_class = Reference
    prompts: ClassVar = plain.TestDeepseekVL.prompts
    assert_arrays = plain.TestDeepseekVL.assert_arrays

    @classmethod
    def write_checkpoint(cls, out):
        ids = save_special(out).convert_tokens_to_ids
        config = DeepseekVLHybridConfig(
            vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
            high_res_vision_config=SamVisionConfig(
                hidden_size=32,
                output_channels=8,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=64,
                patch_size=8,
                window_size=4,
                global_attn_indexes=[0, 2],
                mlp_dim=64,
                initializer_range=0.2,
            ),
            text_config=LlamaConfig(**TEXT),
            image_token_id=ids("<image_placeholder>"),
        )
        save_model(out, Weighted, config, ids("</s>"), ids("<pad>"))
        save_json(out, preprocessor_config={**PIXELS, **HIGH}, processor_config={"num_image_tokens": FEATURES})

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"high_res_vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
            ("preprocessor_config", {"high_res_size": {"height": 32, "width": 32}}, "high_res_size is"),
            ("preprocessor_config", {"high_res_resample": 0}, "high_res_resample is 0"),
            ("preprocessor_config", {"image_processor_type": "DeepseekVLImageProcessor"}, "DeepseekVLImageProcessor"),
        ]
    )
