"""Selection of the video frames to decode, by an item's options or the sampling settings of the model family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import MediaOptions
from mindie_mm.media.video.encoded_video import SampledVideo, Video

_VLLM_FRAMES = 32
"""Number of frames that vLLM samples from a video by default."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Default sampling settings, as in transformers.

    At most one of `num_frames` and `fps` is set. If neither is set, all frames are used. These settings apply to
    encoded videos. If the caller supplies frames, all of them are used unless an option asks for fewer.
    """

    limit: int
    """Maximum number of frames."""
    num_frames: int | None = None
    fps: float | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], limit: int) -> Self:
        """Read the sampling settings from the configuration of a video preprocessor."""
        if not config.get("do_sample_frames", False):
            return cls(limit)
        return cls(limit, config.get("num_frames"), config.get("fps") if config.get("num_frames") is None else None)

    def count(self, video: Video, options: MediaOptions) -> int:
        """Return the number of frames to use from `video`, with the options of its item.

        Raises:
            InputError: The video does not allow one of the options.
            LimitExceeded: The result would be more than `limit`.

        """
        total = video.num_frames
        if options.num_frames is None and options.fps is None and not isinstance(video, SampledVideo):
            own = self.num_frames and min(bounded(self.num_frames, options), total)  # a short video has fewer frames
            options = replace(options, num_frames=own, fps=self.fps)
        check_asked(video, options)
        by_rate = total if options.fps is None or video.fps is None else int(total / video.fps * options.fps)
        return num_taken(by_rate, video, options, self.limit)

    def like_vllm(self, video: Video, options: MediaOptions) -> list[int]:
        """Return the indices of the frames that vLLM samples from `video`, from the first to the last frame.

        Follows `VideoBackend.compute_frames_index_to_sample` in vLLM 0.32, for families without a rule of their own.

        Raises:
            InputError, LimitExceeded: In the same cases as `count`, except that `num_frames` may be too high.

        """
        check_asked(video, replace(options, num_frames=None))
        own = total = video.num_frames
        if options.fps is not None and video.fps is not None:
            own = int(total / video.fps * options.fps)
        elif not isinstance(video, SampledVideo):
            own = _VLLM_FRAMES
        count = num_taken(own, video, options, self.limit)
        indices: list[int] = np.linspace(0, total - 1, count, dtype=int).tolist()
        return indices


def comes_sampled(video: Video, options: MediaOptions) -> bool:
    """Return whether `video` is a list of frames and no option asks to sample them. Then all of them are used."""
    return isinstance(video, SampledVideo) and options.num_frames is None and options.fps is None


def check_asked(video: Video, options: MediaOptions) -> None:
    """Raise InputError if `fps` is given for a video without a frame rate, or if `num_frames` is too high."""
    if options.fps is not None and video.fps is None:
        what = (
            "the frames have no rate; set sample_fps to the rate at which they were sampled"
            if isinstance(video, SampledVideo)
            else "the video has no frame rate; give num_frames instead"
        )
        raise InputError(f"fps is {options.fps:g}, but {what}")
    if options.num_frames is not None and options.num_frames > video.num_frames:
        raise InputError(f"num_frames is {options.num_frames}; the video has only {video.num_frames} frames")


def bounded(count: int, options: MediaOptions) -> int:
    """Return `count` limited to the range of `min_frames` and `max_frames`."""
    count = max(count, options.min_frames or 1)
    return count if options.max_frames is None else min(count, options.max_frames)


def num_taken(own: int, video: Video, options: MediaOptions, limit: int) -> int:
    """Return the number of frames to use from `video`, with all options.

    Args:
        own: Number of frames according to the sampling settings of the family or to `fps`.
        video: The video.
        options: Options of the item.
        limit: Maximum number of frames.

    Raises:
        LimitExceeded: The result would be more than `limit`.

    """
    count = min(bounded(options.num_frames or own, options), video.num_frames)
    if count > limit:
        raise LimitExceeded(
            f"{count} frames of the video would be sampled; the limit is {limit}. Ask for fewer with num_frames, "
            "max_frames or fps"
        )
    return count


def evenly(total: int, count: int) -> list[int]:
    """Return the ascending indices of `count` evenly spaced frames out of `total` frames, starting with 0."""
    return [index * total // count for index in range(count)]


def stepped(total: int, count: float, first: float = 0) -> list[int]:
    """Return the ascending indices of `count` frames out of `total` frames, at a distance of `total / count`.

    The indices equal `torch.arange(first, total, total / count)` truncated to integers, as in transformers. If the step
    is rounded down, this range has an additional index, which is `total`. transformers then fails, for example for 14
    of 17 frames. This function omits the additional index. If `first` is larger than the step, it returns fewer than
    `count` indices. A fractional `count` is rounded up.
    """
    indices: list[int] = torch.arange(first, total, total / count).int()[: math.ceil(count)].tolist()
    return indices
