"""LLaVA-NeXT: the whole image, followed by the tiles of a canvas with similar proportions.

Source: llava-vl.github.io/blog/2024-01-30-llava-next. Token ids, pixels and logits match transformers' `llava_next`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mindie_mm.models._anyres import AnyresProcessor
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.family import PretrainedFamily
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from mindie_mm.nn.splice import MediaItem


class LlavaNextProcessor(AnyresProcessor):
    """Processor for LLaVA-NeXT."""

    config_name = "LlavaNextConfig"
    image_type = "LlavaNextImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "resample": 3,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }


class LlavaNextModel(TowerModel):
    """The LLaVA-NeXT model. `module` is transformers' `LlavaNextForConditionalGeneration`."""

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        sizes = torch.tensor([item.shape.grid for item in items])
        features: list[Tensor] = self.module.model.get_image_features(self.pixels(items), sizes).pooler_output
        return features


class LlavaNext(PretrainedFamily):
    """LLaVA-NeXT, also known as LLaVA 1.6 (Liu et al., 2024), run by transformers' modules."""

    model_types = ("llava_next",)
    published = "llava-hf/llava-v1.6-mistral-7b-hf"
    kinds = ("image",)
    processor = LlavaNextProcessor
    module_name = "LlavaNextForConditionalGeneration"
    other_keys = ("vision_config.vocab_size",)  # of CLIP's text encoder
    model_class = LlavaNextModel
