"""Videos with a separate run of placeholders for each temporal patch, and its time as text beside the run.

Qwen3-VL and GLM-4.1V have such videos. All frames of a video share one limit on their pixels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindie_mm.inputs import Kind, Media, MediaOptions
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.video.encoded_video import Video
from mindie_mm.models._mrope import Grid, mrope_positions
from mindie_mm.models._qwen import QwenModel, QwenProcessor
from mindie_mm.models._qwen_pixels import MAX_ASPECT_RATIO, PixelSettings, bounding_grids, joint_resize
from mindie_mm.nn.family import Spelling
from mindie_mm.nn.model import Positions
from mindie_mm.nn.splice import MediaItem

_UNSTATED_FPS = 24.0
_LIMITS = ("shortest_edge", "longest_edge")
_ZERO = np.zeros((), np.uint8)


class FrameTimesProcessor(QwenProcessor):
    """Processor for videos with frame times as text. Blocks are the same as in Qwen2-VL.

    The grid of a video is (t, h, w), followed by a number for each temporal patch. The time of the patch is derived
    from this number.
    """

    @abstractmethod
    def time_number(self, times: Sequence[float]) -> int:
        """Return the number in the grid for a temporal patch whose frames are at `times`, in seconds."""

    @abstractmethod
    def frame_text(self, number: int) -> str:
        """Return the text of a temporal patch with a single placeholder token.

        `number` is a result of `time_number`.
        """

    def video_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read the video preprocessor's configuration.

        `min_pixels` and `max_pixels` of the result are limits for all frames together.
        """
        limits = {**dict.fromkeys(_LIMITS), **config["size"]}
        own = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        return PixelSettings.read({**config, **own, "cap_pixels_per_frame": None}, where)

    def video_pixels(self, num_frames: int, settings: PixelSettings) -> int:
        """Return the maximum number of pixels of all frames together."""
        return settings.max_pixels

    def frame_size(self, video: Video, num_frames: int, settings: PixelSettings) -> tuple[int, int]:
        settings = replace(settings, max_pixels=self.video_pixels(num_frames, settings))
        return joint_resize(video.height, video.width, num_frames, settings)

    def video_grid(
        self, patches: tuple[int, int, int], video: Video, indices: Sequence[int], options: MediaOptions
    ) -> tuple[int, ...]:
        # The references assume 24 frames per second for frames without a rate.
        temporal, fps = self.video.temporal_patch_size, video.fps or _UNSTATED_FPS
        times = [index / fps for index in indices]
        times += times[-1:] * (-len(times) % temporal)
        return (*patches, *(self.time_number(times[at : at + temporal]) for at in range(0, len(times), temporal)))

    def further_numbers(self, kind: Kind, grid: tuple[int, ...]) -> int:
        return grid[0] if kind == "video" and grid else 0

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        plain = super().spelling(kind, num_features, grid)
        if plain is None or kind != "video":
            return plain
        t, _, _, *numbers = grid
        text = "".join(map(self.frame_text, numbers[:t]))
        return Spelling(text, [(self.placeholders[kind].token,) * (num_features // t)] * t)

    def max_tokens(self, kind: Kind) -> int:
        if kind == "image":
            return super().max_tokens(kind)
        settings, temporal = self.video, self.video.temporal_patch_size
        most = 0
        for num_frames in range(temporal, max(temporal, settings.max_frames) + 1):
            # Pixels are counted with a number of frames that may be rounded down.
            counted = min(num_frames, round(num_frames / temporal) * temporal)
            frame = replace(
                settings,
                min_pixels=-(-settings.min_pixels // num_frames),
                max_pixels=-(-self.video_pixels(num_frames, settings) // counted),
            )
            most = max(most, -(-num_frames // temporal) * max(math.prod(grid) for grid in bounding_grids(frame)))
        return most

    def worst_case(self, kind: Kind) -> Data:
        """Return the data of an item that has `max_tokens` features or nearly as many.

        A video has either many frames that are too elongated to shrink in proportion, or a few large frames.
        """
        if kind == "image":
            return super().worst_case(kind)
        settings = self.video
        shapes: list[tuple[int, int, int, int]] = []
        least = max(settings.min_frames, settings.temporal_patch_size)
        for num_frames in (
            settings.temporal_patch_size,
            least,
            min(least + 1, settings.max_frames),
            settings.max_frames,
        ):
            tokens = max(1, self.video_pixels(num_frames, settings) // (num_frames * settings.factor**2))
            rows = math.isqrt(tokens)
            shapes += [
                (num_frames, rows * settings.factor, tokens // rows * settings.factor, 3),
                (num_frames, 1, MAX_ASPECT_RATIO, 3),
            ]
        return np.zeros(max(shapes, key=self._num_features), np.uint8)

    def _num_features(self, shape: tuple[int, int, int, int]) -> int:
        data = np.broadcast_to(_ZERO, shape)
        return self.plan(Media("video", data), data, {})[0].num_features


class FrameTimesModel(QwenModel):
    """A model whose positions on the time axis do not advance within a video."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        spans: list[tuple[int, int, Grid]] = []
        for item in items:
            t, h, w = item.shape.grid[:3]
            grid = (1, h // self._merge, w // self._merge)
            spans += [(int(run[0]), int(run[-1]) + 1, grid) for run in np.split(item.slots, t)]
        return mrope_positions(length, spans)


def spread(total: int, count: int) -> list[int]:
    """Return `count` ascending, evenly spread indices out of `total` frames, from the first to the last."""
    indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return indices
