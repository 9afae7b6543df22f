"""Qwen3.5 with a mixture of experts in each layer of the decoder.

Source: transformers' `qwen3_5_moe`. Token ids, grids and pixels are those of Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from mindie_mm.models._delta_net import LAYER_TYPE, OTHER_KEYS, delta_net_state
from mindie_mm.models._qwen3 import Qwen3DeltaNetModel, Qwen3Processor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Qwen35MoeProcessor(Qwen3Processor):
    """Processor for Qwen3.5 with a mixture of experts."""

    traits = replace(Qwen3Processor.traits, not_packed="its layers carry a state from each sample to the next")
    config_name = "Qwen3_5MoeConfig"
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen3VLVideoProcessor",)


class Qwen35Moe(PretrainedFamily):
    """Qwen3.5 with a mixture of experts (Qwen Team, 2026), run by transformers' modules and mindie_mm's layers."""

    model_types = ("qwen3_5_moe",)
    published = "Qwen/Qwen3.5-35B-A3B"
    kinds = ("image", "video")
    processor = Qwen35MoeProcessor
    module_name = "Qwen3_5MoeForConditionalGeneration"
    model_class = Qwen3DeltaNetModel
    states: ClassVar = {LAYER_TYPE: delta_net_state}
    other_keys = OTHER_KEYS
