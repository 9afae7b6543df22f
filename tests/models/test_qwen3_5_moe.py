"""Tests for Qwen3.5 with a mixture of experts against transformers, on random weights."""

from typing import ClassVar

from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from tests.models.test_qwen3_5 import TEXT
from tests.models.test_qwen3_5 import Reference as Qwen35Reference
from tests.models.test_qwen3_5 import TestQwen35 as Qwen35Contract


class Reference(Qwen35Reference):
    model_class = Qwen3_5MoeForConditionalGeneration


class TestQwen35Moe(Qwen35Contract):
    name = "qwen3_5_moe"
    reference_class = Reference
    chooses_experts = True
    config_class: ClassVar = Qwen3_5MoeConfig
    text: ClassVar = {
        **{name: value for name, value in TEXT.items() if name != "intermediate_size"},
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }


del Qwen35Contract  # pytest would collect it again
