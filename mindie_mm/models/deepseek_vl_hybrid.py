"""DeepSeek-VL with two towers: SAM sees the image at a high resolution, SigLIP the same padded square at a low one.

Source: arXiv 2403.05525; transformers' deepseek_vl_hybrid, whose ids, pixels and logits these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image import Pixels, resize
from mindie_mm.media.preprocess import background_of, resample_of
from mindie_mm.models.deepseek_vl import DEFAULTS, DeepseekVLModel, DeepseekVLProcessor
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import PretrainedFamily
from mindie_mm.nn.pixels import Normalization
from mindie_mm.shm import ArraySpec

_HIGH = "high_res_pixel_values"


class DeepseekVLHybridProcessor(DeepseekVLProcessor):
    """The tokenizer's half. A block also holds `high_res_pixel_values`, uint8 [high side, high side, 3]."""

    config_name = "DeepseekVLHybridConfig"
    image_type = "DeepseekVLHybridImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "high_res_resample": DEFAULTS["resample"],
        "high_res_size": {"height": 1024, "width": 1024},
        "high_res_image_mean": DEFAULTS["image_mean"],
        "high_res_image_std": DEFAULTS["image_std"],
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        tower = self.config.high_res_vision_config
        if tower.model_type != "sam_vision_model":
            raise UnsupportedCheckpoint(
                f"{self.where}: the high resolution's tower is {tower.model_type!r}, only sam_vision_model is served"
            )
        self._high_side = self.read_side("high_res_size", tower.image_size)
        self._high_resample = resample_of(self.settings, self.where, "high_res_resample")
        self._high_background = background_of(self.settings["high_res_image_mean"])
        self.normalizations[_HIGH] = Normalization.read(self.settings, "high_res_")

    def specs(self) -> Mapping[str, ArraySpec]:
        return {**super().specs(), _HIGH: ArraySpec((self._high_side, self._high_side, 3), "uint8")}

    def write(self, rgb: Pixels, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        high = self.squared(rgb, self._high_side, self._high_resample, self._high_background)
        arrays[_HIGH][...] = high
        arrays["pixel_values"][...] = resize(high, self.side, self.side, self.resample)


class DeepseekVLHybridModel(DeepseekVLModel):
    """With a second tower; `module` is transformers' DeepseekVLHybridForConditionalGeneration."""

    vision_parts = (
        "model.vision_model",
        "model.high_res_vision_model",
        "model.high_res_vision_neck",
        "model.high_res_vision_proj",
    )


class DeepseekVLHybrid(PretrainedFamily):
    """DeepSeek-VL 7B (Lu et al., 2024, arXiv 2403.05525) over transformers' own modules."""

    model_types = ("deepseek_vl_hybrid",)
    published = "deepseek-community/deepseek-vl-7b-chat"
    kinds = ("image",)
    processor = DeepseekVLHybridProcessor
    module_name = "DeepseekVLHybridForConditionalGeneration"
    model_class = DeepseekVLHybridModel
