"""MiniCPM-V 4.6: thumbnails and slices at their own proportions, and the decoder of Qwen3.5.

Token ids and pixels match transformers' `minicpmv4_6`.
"""

from __future__ import annotations

from typing import ClassVar

from mindie_mm.models._delta_net import LAYER_TYPE, OTHER_KEYS, delta_net_state
from mindie_mm.models._minicpmv4_6_base import MiniCPMVModel, MiniCPMVProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class MiniCPMV46Processor(MiniCPMVProcessor):
    """Processor for MiniCPM-V 4.6."""

    config_name = "MiniCPMV4_6Config"


class MiniCPMV46(PretrainedFamily):
    """MiniCPM-V 4.6 (OpenBMB, 2026), run by transformers' modules and mindie_mm's delta-net layers."""

    model_types = ("minicpmv4_6",)
    published = "openbmb/MiniCPM-V-4.6"
    kinds = ("image", "video")
    processor = MiniCPMV46Processor
    module_name = "MiniCPMV4_6ForConditionalGeneration"
    model_class = MiniCPMVModel
    states: ClassVar = {LAYER_TYPE: delta_net_state}
    other_keys = OTHER_KEYS
