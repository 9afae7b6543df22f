"""Pixtral: LLaVA with a tower for images of any size.

Source: arXiv 2410.07073. Token ids, pixels and logits match transformers' `llava`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._pixtral_tower import TOWER, PixtralTowerModel, PixtralTowerProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.pretrained_family import PretrainedFamily


class PixtralProcessor(PixtralTowerProcessor):
    """Processor for Pixtral."""

    config_name = "LlavaConfig"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        if (strategy := checkpoint.config.get("vision_feature_select_strategy", "default")) != "full":
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: vision_feature_select_strategy is {strategy!r}; only 'full' is supported, because "
                "every token of the tower is a patch"
            )


class Pixtral(PretrainedFamily):
    """Pixtral (Mistral AI, 2024, arXiv 2410.07073), run by transformers' modules."""

    model_types = ("llava",)
    published = "mistral-community/pixtral-12b"
    kinds = ("image",)
    processor = PixtralProcessor
    module_name = "LlavaForConditionalGeneration"
    other_keys = ("text_config.is_composition", "vision_config.is_composition", "vision_config.tie_word_embeddings")
    model_class = PixtralTowerModel

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return super().serves(config) and (config.get("vision_config") or {}).get("model_type") == TOWER
