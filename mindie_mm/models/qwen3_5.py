"""Qwen3.5: the processor of Qwen3-VL, and a decoder that alternates gated delta-net layers with full attention.

Source: transformers' `qwen3_5`. Token ids, grids and pixels are those of Qwen3-VL. The tower has no deepstack layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from mindie_mm.models._delta_net import LAYER_TYPE, delta_net_state, replace_delta_nets
from mindie_mm.models._qwen3 import Qwen3Model, Qwen3Processor
from mindie_mm.nn.family import PretrainedFamily
from mindie_mm.nn.model import ModelSpec


class Qwen35Processor(Qwen3Processor):
    """Processor for Qwen3.5. It differs from Qwen3-VL's in the configuration class only."""

    config_name = "Qwen3_5Config"
    image_types = ("Qwen2VLImageProcessor",)
    video_type = "Qwen3VLVideoProcessor"


class Qwen35Model(Qwen3Model):
    """The Qwen3.5 model. `module` is transformers' `Qwen3_5ForConditionalGeneration`."""

    traits = replace(Qwen3Model.traits, projector_parts=("model.visual.merger",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen35Processor) -> None:
        super().__init__(module, spec, processor)
        replace_delta_nets(self.text_model.layers)


class Qwen35(PretrainedFamily):
    """Qwen3.5 (Qwen Team, 2026), run by transformers' modules and mindie_mm's delta-net layers."""

    model_types = ("qwen3_5",)
    published = "Qwen/Qwen3.5-9B"
    kinds = ("image", "video")
    processor = Qwen35Processor
    module_name = "Qwen3_5ForConditionalGeneration"
    model_class = Qwen35Model
    states: ClassVar = {LAYER_TYPE: delta_net_state}
