"""Tests for GLM-4.5V against transformers, on random weights."""

from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

from tests.models.test_glm4v import TEXT, VISION, GlmContract, Reference
from tests.models.test_glm4v import TestGlm4V as Glm4VContract

EXPERTS = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 0.5,
}


class MoeReference(Reference):
    model_class = Glm4vMoeForConditionalGeneration


class TestGlm4VMoe(GlmContract):
    name = "glm4v_moe"
    reference_class = MoeReference
    chooses_experts = True
    processor_names = Glm4VContract.processor_names
    ignored_options = Glm4VContract.ignored_options

    @classmethod
    def configuration(cls, tokens):
        config = Glm4vMoeConfig(text_config={**TEXT, **EXPERTS}, vision_config=VISION, **tokens)
        return Glm4vMoeForConditionalGeneration, config
