"""Qwen2.5-VL: Qwen2-VL with windowed attention in the tower and with video positions that follow time in seconds.

Source: arXiv 2502.13923. The reference is transformers' `qwen2_5_vl`, which has the processors of Qwen2-VL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from mindie_mm.inputs import Kind, MediaOptions
from mindie_mm.media.video.encoded_video import Video
from mindie_mm.models._qwen import INTERVAL_GRIDS, PICOSECONDS, QwenModel, QwenProcessor
from mindie_mm.models._tower_places import window_places
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_UNSTATED_FPS = 24.0


class Qwen25VLProcessor(QwenProcessor):
    """Processor for Qwen2.5-VL. Blocks are the same as in Qwen2-VL.

    The grid of a video is (t, h, w, interval), where `interval` is the time between two steps of t in picoseconds.
    """

    traits = replace(QwenProcessor.traits, grids=INTERVAL_GRIDS, samples_like_vllm=True)
    config_name = "Qwen2_5_VLConfig"
    vllm_kinds = ("image", "video")
    image_types = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")  # two names of the same class
    video_types = ("Qwen2VLVideoProcessor",)

    def video_grid(
        self, patches: tuple[int, int, int], video: Video, indices: Sequence[int], options: MediaOptions
    ) -> tuple[int, ...]:
        # The reference assumes 24 frames per second for frames without a rate.
        fps = _UNSTATED_FPS if video.fps is None else len(indices) / video.num_frames * video.fps
        return (*patches, _picoseconds(self.video.temporal_patch_size / fps))

    def vllm_layout(self, kind: Kind) -> PatchLayout:
        layout = super().vllm_layout(kind)
        return msgspec.structs.replace(layout, seconds="second_per_grid_ts") if kind == "video" else layout

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        inputs = super().item_inputs(item, device)
        if item.shape.kind == "video":
            inputs["second_per_grid_ts"] = torch.tensor([item.shape.grid[3] / PICOSECONDS])
        return inputs

    def further_numbers(self, kind: Kind, grid: tuple[int, ...]) -> int:
        return 1 if kind == "video" else 0


class Qwen25VLModel(QwenModel):
    """The Qwen2.5-VL model. `module` is transformers' `Qwen2_5_VLForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen25VLProcessor) -> None:
        super().__init__(module, spec, processor)
        self._tokens_per_second: int = module.config.vision_config.tokens_per_second

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        shape = super().describe_segments(view)
        if shape.kind != "video":
            return shape
        return replace(shape, grid=(*shape.grid, _picoseconds(view["second_per_grid_t"].item())))

    def interval(self, shape: MediaShape) -> float:
        """Return the distance in positions between two steps on the time axis, in float32 as in the reference."""
        if shape.kind != "video":
            return 1.0
        return float(np.float32(shape.grid[3] / PICOSECONDS) * self._tokens_per_second)

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        return super().places(grids) | window_places(self.module.model.visual, grids, self.spec.device)


class Qwen25VL(PretrainedFamily):
    """Qwen2.5-VL (Bai et al., 2025, arXiv 2502.13923), run by transformers' modules."""

    model_types = ("qwen2_5_vl",)
    published = "Qwen/Qwen2.5-VL-7B-Instruct"
    kinds = ("image", "video")
    processor = Qwen25VLProcessor
    module_name = "Qwen2_5_VLForConditionalGeneration"
    other_keys = ("vision_token_id", "vision_config.in_chans", "vision_config.spatial_patch_size")
    model_class = Qwen25VLModel


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
