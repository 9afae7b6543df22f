"""GLM-OCR: the prompts of GLM-4.6V, with a tower without learned positions and a small decoder.

Source: arXiv 2507.01006. Token ids, grids and pixels match transformers' `glm_ocr`.
"""

from __future__ import annotations

from mindie_mm.models._glm4v_base import GlmModel, GlmProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class GlmOcrProcessor(GlmProcessor):
    """Processor for GLM-OCR."""

    config_name = "GlmOcrConfig"


class GlmOcr(PretrainedFamily):
    """GLM-OCR (Z.ai, 2026), run by transformers' modules."""

    model_types = ("glm_ocr",)
    published = "zai-org/GLM-OCR"
    kinds = ("image", "video")
    processor = GlmOcrProcessor
    module_name = "GlmOcrForConditionalGeneration"
    other_keys = (
        "text_config.attention_bias",  # false in the published checkpoint. Weights of biases would be refused
        "text_config.head_dim",  # the network reads this key, although its configuration class does not have it
        "text_config.num_nextn_predict_layers",  # layers for speculative decoding, which are not loaded
        "vision_config.hidden_dropout_prob",  # only read in training
    )
    model_class = GlmModel
