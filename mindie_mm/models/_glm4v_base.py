"""Processor and model of GLM-4.1V, which later GLM models extend.

Source: arXiv 2507.01006. Token ids, grids and pixels match transformers' `glm4v` and `glm46v`. The placeholders of
videos are those of images. The processors that a checkpoint names decide which frames are sampled and how their times
are written, and `model_type` does not: GLM-4.6V-Flash is a `glm4v` with the processors of `glm46v`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._frame_times import FrameTimesModel, FrameTimesProcessor, spread
from mindie_mm.models._qwen import THW
from mindie_mm.models._qwen_pixels import PixelSettings, joint_resize
from mindie_mm.models._tower_places import interpolation
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder
from mindie_mm.nn.layers import PatchProjection
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.weights.pretrained import read_config

_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
)
_WHOLE_SECONDS, _TENTHS = "Glm4vProcessor", "Glm46VProcessor"
_BY_LENGTH = "Glm46VVideoProcessor"
# Settings of the reference that no file states.
_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Longest duration in seconds of a video, and temporal patches per second that are then sampled."""
_MOST_FRAMES = 640
_IMAGE_DEFAULTS: Mapping[str, Any] = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "do_sample_frames": True,
    "fps": 2,
    "max_duration": 300,
}


class GlmProcessor(FrameTimesProcessor):
    """Processor for GLM-4.1V. Blocks are the same as in Qwen2-VL.

    The grid of a video is (t, h, w), followed by the time of the first frame of each temporal patch in whole or in
    tenths of a second.
    """

    traits = replace(
        FrameTimesProcessor.traits,
        grids={"image": THW, "video": f"{THW}, and the time of each patch in seconds or in tenths of a second"},
        mindie_layouts={},
    )
    image_types = ("Glm4vImageProcessor", "Glm46VImageProcessor")  # two names of the same class
    video_types = ("Glm4vVideoProcessor", _BY_LENGTH)
    image_defaults = _IMAGE_DEFAULTS
    video_defaults = _VIDEO_DEFAULTS

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._in_tenths = _processor_type(checkpoint) == _TENTHS
        config = read_config(self.config_name, checkpoint)
        image = (config.image_start_token_id,), (config.image_end_token_id,)
        video = (config.video_start_token_id,), (config.video_end_token_id,)
        token = config.image_token_id
        self.placeholders = {
            "image": Placeholder(image[0], token, image[1]),
            "video": Placeholder(video[0], token, video[1], marker="<|video|>"),
        }

    def image_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        # The reference's limits are those of an image as a video, in which the image is repeated.
        settings = super().video_settings(config, where)
        temporal = settings.temporal_patch_size
        return replace(
            settings, min_pixels=-(-settings.min_pixels // temporal), max_pixels=settings.max_pixels // temporal
        )

    def image_size(self, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
        return joint_resize(height, width, 1, replace(settings, temporal_patch_size=1))

    def video_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read the video preprocessor's configuration, whose num_frames the reference ignores."""
        if not config["do_sample_frames"]:
            raise UnsupportedCheckpoint(f"{where}: do_sample_frames is False; only True is supported")
        settings = replace(super().video_settings(config, where), num_frames=None, min_frames=1)
        self._max_duration: float = config["max_duration"]
        if config["video_processor_type"] == _BY_LENGTH:
            return replace(settings, fps=None, max_frames=_MOST_FRAMES)
        return replace(settings, max_frames=max(1, int(self._max_duration * config["fps"])))

    def sample(self, total: int, fps: float | None, settings: PixelSettings) -> list[int]:
        if settings.num_frames is None and fps is None:
            return spread(total, min(total, settings.max_frames))
        if settings.num_frames is not None or fps is None:
            indices = spread(total, settings.num_frames or total)
        elif settings.fps is None:
            indices = _by_length(total, fps, settings.temporal_patch_size)
        else:
            indices = _at_rate(total, fps, settings.fps, self._max_duration)
        count = min(max(len(indices), settings.min_frames), settings.max_frames, total)
        if count != len(indices):
            indices = spread(total, count)
        # The reference repeats the last frame in pairs, whatever the temporal patch size is.
        return indices + indices[-1:] * (len(indices) % 2)

    def time_number(self, times: Sequence[float]) -> int:
        # The time is formatted as text first, so that tenths are rounded as in the reference.
        return int(f"{times[0]:.1f}".replace(".", "")) if self._in_tenths else int(times[0])

    def frame_text(self, number: int) -> str:
        time = f"{number // 10}.{number % 10} seconds" if self._in_tenths else str(number)
        return f"<|begin_of_image|><|image|><|end_of_image|>{time}"


def _at_rate(total: int, fps: float, rate: float, max_duration: float) -> list[int]:
    """Return the frames of a video of `total` frames at `fps`, sampled at `rate` frames per second.

    From a video that is longer than `max_duration` seconds, as many frames are sampled as from one of this length.
    """
    duration, last = total / fps, total - 1
    if duration <= max_duration:
        indices = [min(last, math.ceil(index * fps / rate)) for index in range(max(math.floor(duration * rate), 1))]
    elif (count := int(max_duration * rate)) >= total:
        indices = [*range(total)]
    else:
        indices = [min(last, math.ceil(time * fps)) for time in np.linspace(0, duration, count)]
    return sorted({*indices})


def _by_length(total: int, fps: float, temporal: int) -> list[int]:
    """Return the frames of a video of `total` frames at `fps`, sampled at a rate that depends on its duration."""
    duration = total / fps
    rate = next((rate for longest, rate in _RATES if duration <= longest), _RATES[-1][1])
    count = max(1, min(int(min(duration, _RATES[-1][0]) * rate * temporal), _MOST_FRAMES))
    first, last = 0, total - 1
    indices: list[int] = []
    if total >= count:
        step, after, frame_s = 1 / (temporal * rate), 0.0, 1 / fps
        for index in range(total):
            if index * frame_s >= after:
                indices.append(index)
                after += step
                if after >= int(duration):
                    break
        if len(indices) < count:
            first, last = indices[0], indices[-1]
    if len(indices) != count:
        indices = np.linspace(first, last, count, dtype=int).tolist()
    return sorted({*indices})


def _processor_type(checkpoint: Checkpoint) -> str:
    """Return the processor class that transformers chooses for a checkpoint.

    Raise UnsupportedCheckpoint for any other class than the two of GLM.
    """
    for file in _PROCESSOR_FILES:
        if (stated := checkpoint.json(file).get("processor_class")) is None:
            continue
        if stated not in (_WHOLE_SECONDS, _TENTHS):
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: processor_class is {stated!r} in {file}; only {_WHOLE_SECONDS} and {_TENTHS} are "
                "supported. Copy the file from the original repository"
            )
        return str(stated)
    return _TENTHS if checkpoint.config.get("model_type") == "glm46v" else _WHOLE_SECONDS


class GlmModel(FrameTimesModel):
    """The GLM-4.1V model. `module` is transformers' `Glm4vForConditionalGeneration`, or a class with the same parts."""

    traits = replace(FrameTimesModel.traits, mindie_layouts={})

    def __init__(self, module: Any, spec: ModelSpec, processor: GlmProcessor) -> None:
        super().__init__(module, spec, processor)
        visual = module.model.visual
        if (embeddings := getattr(visual, "embeddings", None)) is not None:  # some towers have only rotary positions
            visual.embeddings = _Positions(embeddings, self._merge)
        visual.downsample = PatchProjection(visual.downsample)


class _Positions(nn.Module):
    """The position embeddings of the tower, resampled to the size of each image.

    transformers calls `grid_sample`, at coordinates that it derives from the grids on the device. Here, each embedding
    is a weighted sum of sixteen, whose indices and weights are computed on the host.
    """

    interpolation_mode, interpolation_align_corners = "bicubic", False

    def __init__(self, embeddings: Any, merge: int) -> None:
        super().__init__()
        self.position_embedding: nn.Embedding = embeddings.position_embedding
        self.num_grid_per_side = math.isqrt(self.position_embedding.num_embeddings)
        self._merge = merge

    def forward(self, hidden: Tensor, lengths: Tensor, grids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Add the embeddings to patches [n, width]. `grids` is int64 [items, 3]."""
        # The grids are on the host, unless the tower has a placement of its own, which moves them to its device.
        indices, weights = interpolation(self, grids.cpu(), self._merge, hidden.device).values()
        resampled = torch.bmm(weights.unsqueeze(1), self.position_embedding(indices).float()).squeeze(1)
        return hidden + resampled.to(hidden.dtype)
