"""How many frames are taken from a video, and which, as transformers' default sampling has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import MediaOptions
from mindie_mm.media.video import Video


@dataclass(frozen=True, slots=True)
class Sampling:
    """At most one of `num_frames` and `fps`; neither: every frame is taken."""

    limit: int
    """Most frames."""
    num_frames: int | None = None
    fps: float | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], limit: int) -> Self:
        """From a video preprocessor's configuration, where that says to sample."""
        if not config.get("do_sample_frames", False):
            return cls(limit)
        return cls(limit, config.get("num_frames"), config.get("fps") if config.get("num_frames") is None else None)

    def count(self, video: Video, options: MediaOptions) -> int:
        """Frames taken from `video` under its item's options. InputError, LimitExceeded."""
        num_frames, fps, total = self.num_frames, self.fps, video.num_frames
        if options.num_frames is not None or options.fps is not None:
            num_frames, fps = options.num_frames, options.fps
        if fps is not None:
            if video.fps is None:
                raise InputError(f"fps {fps:g} is asked of a video that states no frame rate; num_frames can be given")
            least, most = options.min_frames or 1, min(total, options.max_frames or total)
            num_frames = min(max(int(total / video.fps * fps), least), most)
        if num_frames is None:
            num_frames = total
        if num_frames > total:
            raise InputError(f"num_frames {num_frames} is more than the video's {total} frames")
        if num_frames > self.limit:
            raise LimitExceeded(
                f"{num_frames} frames of the video would be taken; the limit is {self.limit}: "
                "num_frames or fps can ask for fewer"
            )
        return num_frames


def evenly(total: int, count: int) -> list[int]:
    """Indices of `count` of `total` frames, ascending, from the first."""
    return [index * total // count for index in range(count)]
