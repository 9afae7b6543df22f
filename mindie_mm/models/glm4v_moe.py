"""GLM-4.5V and GLM-4.6V: the tower and the prompts of GLM-4.1V, with a mixture of experts in the decoder.

Source: arXiv 2507.01006. Token ids, grids and pixels match transformers' `glm4v_moe`.
"""

from __future__ import annotations

from mindie_mm.models._glm4v_base import GlmModel, GlmProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Glm4VMoeProcessor(GlmProcessor):
    """Processor for GLM-4.5V."""

    config_name = "Glm4vMoeConfig"


class Glm4VMoe(PretrainedFamily):
    """GLM-4.5V and GLM-4.6V (GLM-V Team, 2025, arXiv 2507.01006), run by transformers' modules."""

    model_types = ("glm4v_moe",)
    published = "zai-org/GLM-4.5V"
    kinds = ("image", "video")
    processor = Glm4VMoeProcessor
    module_name = "Glm4vMoeForConditionalGeneration"
    other_keys = (
        "text_config.image_start_token_id",
        "text_config.image_end_token_id",
        "text_config.image_token_id",
        "text_config.num_nextn_predict_layers",  # layers for speculative decoding, which are not loaded
        "text_config.partial_rotary_factor",  # rope_parameters repeats this key
        "text_config.qk_layernorm",  # repeats use_qk_norm
        "vision_config.hidden_dropout_prob",  # only read in training
        "text_config.use_qk_norm",  # false in all published checkpoints. Weights of such norms would be refused
    )
    model_class = GlmModel
