"""Qwen3-VL: the patches of Qwen2-VL, outputs of several tower layers in the decoder, and frame times as text.

Source: arXiv 2511.21631. Token ids, grids and pixels match transformers' `qwen3_vl`.
"""

from __future__ import annotations

from dataclasses import replace

from mindie_mm.models._qwen3 import Qwen3Model, Qwen3Processor
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.weights.shares import DECODER_PLAN


class Qwen3VLProcessor(Qwen3Processor):
    """Processor for Qwen3-VL."""

    traits = replace(Qwen3Processor.traits, samples_like_vllm=True)
    config_name = "Qwen3VLConfig"
    vllm_kinds = ("image", "video")
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen3VLVideoProcessor",)


class Qwen3VL(PretrainedFamily):
    """Qwen3-VL (Bai et al., 2025, arXiv 2511.21631), run by transformers' modules."""

    model_types = ("qwen3_vl",)
    published = "Qwen/Qwen3-VL-4B-Instruct"
    kinds = ("image", "video")
    processor = Qwen3VLProcessor
    module_name = "Qwen3VLForConditionalGeneration"
    model_class = Qwen3Model
    tp_plan = DECODER_PLAN
    default_theta = 5_000_000.0  # the default of transformers 4; transformers 5 has a tenth of this value
