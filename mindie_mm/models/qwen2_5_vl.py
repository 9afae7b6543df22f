"""Qwen2.5-VL: Qwen2-VL with windows in its tower, and with seconds on the time axis of a video's positions.

Source: arXiv 2502.13923; transformers' qwen2_5_vl, whose processors are Qwen2-VL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.inputs import Kind, MediaOptions
from mindie_mm.media.video.encoded_video import Video
from mindie_mm.models.qwen2_vl import Qwen2VLModel, Qwen2VLProcessor
from mindie_mm.nn.family import PretrainedFamily
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.splice import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_UNSTATED_FPS = 24.0
PICOSECONDS = 10**12
"""In a second."""


class Qwen25VLProcessor(Qwen2VLProcessor):
    """The tokenizer's half. Blocks are Qwen2-VL's; a video's grid: (t, h, w, picoseconds from one t to the next)."""

    config_name = "Qwen2_5_VLConfig"
    image_types = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")  # the same class in the first release

    def video_grid(
        self, patches: tuple[int, int, int], video: Video, indices: Sequence[int], options: MediaOptions
    ) -> tuple[int, ...]:
        # Frames without a rate are ones of 24 a second to the reference.
        fps = _UNSTATED_FPS if video.fps is None else len(indices) / video.num_frames * video.fps
        return (*patches, _picoseconds(self.video.temporal_patch_size / fps))

    def further_numbers(self, kind: Kind, grid: tuple[int, ...]) -> int:
        return 1 if kind == "video" else 0


class Qwen25VLModel(Qwen2VLModel):
    """Vision tower and decoder; `module` is transformers' Qwen2_5_VLForConditionalGeneration."""

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen25VLProcessor) -> None:
        super().__init__(module, spec, processor)
        self._tokens_per_second: int = module.config.vision_config.tokens_per_second

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        shape = super().describe_segments(view)
        if shape.kind != "video":
            return shape
        return replace(shape, grid=(*shape.grid, _picoseconds(view["second_per_grid_t"].item())))

    def interval(self, shape: MediaShape) -> float:
        """In positions; rounded as the reference does it, in float32."""
        if shape.kind != "video":
            return 1.0
        return float(np.float32(shape.grid[3] / PICOSECONDS) * self._tokens_per_second)

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        return super().places(grids) | window_places(self.module.model.visual, grids, self.spec.device)


def window_places(visual: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the windowed tower `visual` takes of where the patches of grids int64 [items, 3] lie, by its own names.

    It would sort by numbers of the host, and wait for the device each time. The windows' bounds are read on the host.
    """
    from transformers.vision_utils import get_vision_window_index  # late, as the layers

    index, bounds = get_vision_window_index(grids, visual.spatial_merge_size, visual.window_size, visual.patch_size)
    return {"window_index": upload(index, device), "cu_window_seqlens": bounds}


class Qwen25VL(PretrainedFamily):
    """Qwen2.5-VL (Bai et al., 2025, arXiv 2502.13923) over transformers' own modules."""

    model_types = ("qwen2_5_vl",)
    published = "Qwen/Qwen2.5-VL-7B-Instruct"
    kinds = ("image", "video")
    processor = Qwen25VLProcessor
    module_name = "Qwen2_5_VLForConditionalGeneration"
    other_keys = ("vision_token_id", "vision_config.in_chans", "vision_config.spatial_patch_size")
    model_class = Qwen25VLModel


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
