"""Qwen2-VL: images and videos of any size, and positions on three axes.

Source: arXiv 2409.12191. Token ids, grids and pixels match transformers' `qwen2_vl`.
"""

from __future__ import annotations

from dataclasses import replace

from mindie_mm.models._qwen import QwenModel, QwenProcessor
from mindie_mm.nn.pretrained_family import PretrainedFamily


class Qwen2VLProcessor(QwenProcessor):
    """Processor for Qwen2-VL."""

    traits = replace(QwenProcessor.traits, samples_like_vllm=True)
    config_name = "Qwen2VLConfig"
    vllm_kinds = ("image", "video")
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen2VLVideoProcessor",)


class Qwen2VL(PretrainedFamily):
    """Qwen2-VL (Wang et al., 2024, arXiv 2409.12191), run by transformers' modules."""

    model_types = ("qwen2_vl",)
    published = "Qwen/Qwen2-VL-2B-Instruct"
    kinds = ("image", "video")
    processor = Qwen2VLProcessor
    module_name = "Qwen2VLForConditionalGeneration"
    other_keys = ("vision_token_id", "vision_config.in_chans", "vision_config.spatial_patch_size")
    model_class = QwenModel
