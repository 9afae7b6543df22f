"""Qwen3.5: the processor of Qwen3-VL, and a decoder that alternates gated delta-net layers with full attention.

Source: transformers' `qwen3_5`. Token ids, grids and pixels are those of Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from mindie_mm.models._delta_net import LAYER_TYPE, OTHER_KEYS, delta_net_state
from mindie_mm.models._qwen3 import Qwen3DeltaNetModel, Qwen3Processor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Qwen35Processor(Qwen3Processor):
    """Processor for Qwen3.5."""

    traits = replace(Qwen3Processor.traits, not_packed="its layers carry a state from each sample to the next")
    config_name = "Qwen3_5Config"
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen3VLVideoProcessor",)


class Qwen35(PretrainedFamily):
    """Qwen3.5 (Qwen Team, 2026), run by transformers' modules and mindie_mm's delta-net layers."""

    model_types = ("qwen3_5",)
    published = "Qwen/Qwen3.5-9B"
    kinds = ("image", "video")
    processor = Qwen35Processor
    module_name = "Qwen3_5ForConditionalGeneration"
    model_class = Qwen3DeltaNetModel
    states: ClassVar = {LAYER_TYPE: delta_net_state}
    other_keys = OTHER_KEYS
