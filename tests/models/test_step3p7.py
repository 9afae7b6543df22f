"""Tests for Step 3.7 against transformers, on random weights."""

import shutil
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from transformers import (
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    Step3p7ImageProcessor,
    Step3p7Processor,
)

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Media
from mindie_mm.models import family_named, load_model, processor_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.experts import Experts, JoinedExperts
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

SPECIAL_TOKENS = (
    "<unk>",
    "<|EOT|>",
    "<|im_start|>",
    "<|im_end|>",
    "<im_patch>",
    "<im_start>",
    "<im_end>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<im_patch>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Keys of stepfun-ai/Step-3.7-Flash, with smaller sizes.
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 12,
    "intermediate_size": 96,
    "moe_layers_enum": "1,2",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 24,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 0.4],
    "swiglu_limits_shared": [0.0, 0.4, 0.0],
    "rope_theta": [5000000.0, 10000.0, 5000000.0],
    "partial_rotary_factors": [0.5, 1.0, 0.5],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "pad_token_id": 1,
}
VISION = {
    "width": 32,
    "layers": 2,
    "heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "mlp_ratio": 2.0,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<im_patch>"}
    model_class = Step3p7ForConditionalGeneration
    processor_class = Step3p7Processor
    parts = (Step3p7ImageProcessor, AutoTokenizer)

    def inputs(self, items):
        found = super().inputs(items)
        found.pop("patch_newline_masks", None)
        return found


class TestStep3p7(ExtremeShapes, FamilyContract):
    name = "step3p7"
    reference_class = Reference
    chooses_experts = True
    int8_tolerance = 0.25  # rounding chooses other experts in a narrow model
    prompts: ClassVar = {**IMAGE_PROMPTS, "many crops": [{"image": noise(200, 150)}, {"text": "Why?"}]}

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|EOT|>", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        config = Step3p7Config(text_config=dict(TEXT), vision_config=dict(VISION), image_token_id=ids("<im_patch>"))
        save_model(out, Step3p7ForConditionalGeneration, config, ids("<|im_end|>"), ids("<|EOT|>"))
        images = {"size": {"height": 112, "width": 112}, "patch_size": 56, "max_image_size": 224}
        save_json(out, preprocessor_config={**images, "image_processor_type": "Step3p7ImageProcessor"})

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"size": {"height": 112}}, "must have height and an equal width"),
            ("preprocessor_config", {"patch_size": 60}, "patch_size is 60 pixels; it must be a multiple of 56"),
            ("preprocessor_config", {"vision_patch_size": 16}, "vision_patch_size is 16"),
        ]
    )

    def test_the_default_image_token_is_refused_if_the_vocabulary_lacks_it(self, path):
        config = {name: value for name, value in Checkpoint.open(path).config.items() if name != "image_token_id"}
        with pytest.raises(UnsupportedCheckpoint, match="has the id 151679; ids must be below 400"):
            processor_of(replace(Checkpoint.open(path), config=config), family_named(self.name))

    def test_an_image_with_too_many_crops_is_refused(self, processor):
        image = noise(33, 1000)
        with pytest.raises(LimitExceeded, match=r"1000x33 pixels, .* the limit is 16 crops"):
            processor.plan(Media("image", image), image, {"image": 1})

    def test_experts_run_here_with_their_clamps(self, model):
        found = [part for part in model.module.modules() if isinstance(part, Experts | JoinedExperts)]
        assert len(found) == 2

    def test_the_published_layout_gives_the_same_logits(self, path, model, tokenized, tmp_path):
        """Published folders have no settings of images. Text does not depend on them."""
        published = shutil.copytree(path, tmp_path / "own")
        (published / "preprocessor_config.json").unlink()
        own = {
            "model_type": "step3p7",
            "image_token_id": 4,
            "image_token_len": 169,
            "patch_token_len": 81,
            "understand_projector_stride": 2,
            "projector_bias": False,
            "vision_config": {
                **VISION,
                "model_type": "perception_encoder",
                "use_cls_token": False,
                "ls_init_value": 0.1,
                "use_ln_post": False,
                "hidden_act": "quick_gelu",
                "output_dim": None,
                "pool_type": "none",
            },
            "text_config": {
                **TEXT,
                "model_type": "step3p5",
                "use_moe": True,
                "norm_expert_weight": True,
                "moe_router_activation": "sigmoid",
                "att_impl_type": "GQA",
                "yarn_only_types": ["full_attention"],
                "use_head_wise_attn_gate": True,
                "use_moe_router_bias": True,
                "need_fp32_gate": True,
            },
        }
        save_json(published, config=own)
        assert family_named(self.name).unknown_keys(Checkpoint.open(published)) == []
        served = load_model(published, device="cpu", dtype="float32")
        logits = self.logits(served, tokenized["text"])
        torch.testing.assert_close(logits, self.logits(model, tokenized["text"]).cpu(), rtol=1e-4, atol=1e-4)
        image = noise(300, 400)
        processor = family_named(self.name).processor(Checkpoint.open(published))
        assert processor.plan(Media("image", image), image, {"image": 1})[0].num_features == 169
        own["text_config"]["moe_router_activation"] = "softmax"
        save_json(published, config=own)
        self.assert_refused(published, r"\(text_config\): moe_router_activation is 'softmax'")
