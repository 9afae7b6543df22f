"""GLM-4.1V-Thinking and GLM-4.6V-Flash: the patches of Qwen2-VL, in a tower with resampled position embeddings.

Source: arXiv 2507.01006. Token ids, grids and pixels match transformers' `glm4v` and `glm46v`, which have the same
network.
"""

from __future__ import annotations

from mindie_mm.models._glm4v_base import GlmModel, GlmProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Glm4VProcessor(GlmProcessor):
    """Processor for GLM-4.1V."""

    config_name = "Glm4vConfig"


class Glm4V(PretrainedFamily):
    """GLM-4.1V-Thinking and GLM-4.6V-Flash (GLM-V Team, 2025, arXiv 2507.01006), run by transformers' modules."""

    model_types = ("glm46v", "glm4v")
    published = "zai-org/GLM-4.6V-Flash"
    kinds = ("image", "video")
    processor = Glm4VProcessor
    module_name = "Glm4vForConditionalGeneration"
    other_keys = (
        "text_config.attention_bias",  # true in all published checkpoints. Missing weights of biases would be refused
        "vision_config.hidden_dropout_prob",  # only read in training
    )
    model_class = GlmModel
