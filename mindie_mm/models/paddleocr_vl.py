"""PaddleOCR-VL: patches of each image at its own resolution, and an ERNIE-4.5 decoder with positions on three axes.

Source: arXiv 2510.14528. Token ids, grids and pixels match transformers' `paddleocr_vl`. Weights in PaddlePaddle's
layout are renamed by transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindie_mm.models._qwen import QwenModel, QwenProcessor
from mindie_mm.models._qwen_pixels import PixelSettings, check_aspect_ratio, smart_resize
from mindie_mm.models._tower_places import interpolation
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pretrained_family import PretrainedFamily

_IMAGE_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
    "temporal_patch_size": 1,
}


class PaddleOCRVLProcessor(QwenProcessor):
    """Processor for PaddleOCR-VL. Blocks are the same as in Qwen2-VL, with the patches row by row."""

    traits = replace(QwenProcessor.traits, grids={"image": QwenProcessor.traits.grids["image"]}, mindie_layouts={})
    config_name = "PaddleOCRVLConfig"
    image_types = ("PaddleOCRVLImageProcessor",)
    image_defaults = _IMAGE_DEFAULTS
    groups_patches = False

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        inputs, side = super().item_inputs(item, device), self.image.patch_size
        return inputs | {"pixel_values": inputs["pixel_values"].unflatten(1, (3, side, side))}

    def image_size(self, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
        check_aspect_ratio(height, width)
        # The reference first enlarges an image that is less than one token high or wide.
        if height < settings.factor:
            height, width = settings.factor, round(width * settings.factor / height)
        if width < settings.factor:
            height, width = round(height * settings.factor / width), settings.factor
        return smart_resize(height, width, settings)


class PaddleOCRVLModel(QwenModel):
    """The PaddleOCR-VL model. `module` is transformers' `PaddleOCRVLForConditionalGeneration`."""

    traits = replace(QwenModel.traits, mindie_layouts={}, projector_parts=("model.projector",))
    patch_projection = "model.visual.vision_model.embeddings.patch_embedding"

    def call_visual(self, patches: Tensor, grids: Tensor) -> Any:
        side = self._pixels["image"].patch_size
        out = self.module.model.visual(patches.view(1, -1, 3, side, side), grid_thw=grids, **self.places(grids))
        out.pooler_output = self.module.model.projector(out.last_hidden_state, grids)
        return out

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        embeddings = self.module.model.visual.vision_model.embeddings
        return super().places(grids) | interpolation(embeddings, grids, self._group, self.spec.device)


class PaddleOCRVL(PretrainedFamily):
    """PaddleOCR-VL (Cui et al., 2025, arXiv 2510.14528), run by transformers' modules."""

    model_types = ("paddleocr_vl",)
    published = "PaddlePaddle/PaddleOCR-VL"
    kinds = ("image",)
    processor = PaddleOCRVLProcessor
    module_name = "PaddleOCRVLForConditionalGeneration"
    model_class = PaddleOCRVLModel
    other_keys = (
        *words("attention_probs_dropout_prob compression_ratio hidden_dropout_prob ignored_index max_sequence_length"),
        *words("rope_is_neox_style sliding_window use_3d_rope use_flash_attention weight_share_add_bias"),
        *words("vision_config.temporal_patch_size vision_config.tokens_per_second"),  # keys for videos
    )
