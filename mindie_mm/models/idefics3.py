"""Idefics3: an image as tiles, followed by the whole image. The prompt labels each tile with its row and column.

Source: arXiv 2408.12637. Token ids, pixels and logits match transformers' `idefics3`.
"""

from __future__ import annotations

from mindie_mm.models._idefics import IdeficsModel, IdeficsProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Idefics3Processor(IdeficsProcessor):
    """Processor for Idefics3."""

    config_name = "Idefics3Config"
    image_type = "Idefics3ImageProcessor"


class Idefics3(PretrainedFamily):
    """Idefics3 (Laurençon et al., 2024, arXiv 2408.12637), run by transformers' modules."""

    model_types = ("idefics3",)
    published = "HuggingFaceM4/Idefics3-8B-Llama3"
    kinds = ("image",)
    processor = Idefics3Processor
    module_name = "Idefics3ForConditionalGeneration"
    model_class = IdeficsModel
