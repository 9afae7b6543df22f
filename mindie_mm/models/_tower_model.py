"""Model of LLaVA, which other models with a tower and a projector extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel


class TowerModel(ImageModel, PretrainedModel):
    """The LLaVA model, and the base class of models with the same structure.

    `module` is transformers' `LlavaForConditionalGeneration`, or a class with the same parts.
    """

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Any) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: list[Tensor] = self.module.model.get_image_features(self.pixels(items)).pooler_output
        return list(features)
