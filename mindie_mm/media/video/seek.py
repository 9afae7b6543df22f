"""Decoding of frames that are far apart. For each frame, decoding starts at the last keyframe before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.media.guard.container import packets_of

CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""FFmpeg's names of the containers in which seeking is exact."""
LEAST_SPARED = 8
"""Number of skipped frames above which seeking pays off, although it flushes the decoder."""


@dataclass(frozen=True, slots=True, eq=False)
class Keyframes:
    """The keyframes of a video, at which decoding can start."""

    times: NDArray[np.int64]
    """Ascending presentation times of all frames, [frames], in units of the time base of the stream."""
    places: NDArray[np.int64]
    """Ascending indices of keyframes, [keyframes]. Frames at or after a keyframe do not depend on frames before it."""

    @classmethod
    def of(cls, times: NDArray[np.int64], key_times: NDArray[np.int64]) -> Keyframes | None:
        """Create an object from the times of all frames and the times of keyframes, both in decoding order.

        Return None unless both sequences are ascending.
        """
        if not len(times) or not len(key_times):
            return None
        if not (np.diff(times) > 0).all() or not (np.diff(key_times) > 0).all():
            return None
        return cls(times, np.flatnonzero(np.isin(times, key_times)))

    def before(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the index of the last keyframe at or before each of `indices`, or -1 if there is no such keyframe."""
        positions = np.searchsorted(self.places, indices, side="right")
        return np.concatenate(([-1], self.places))[positions]

    def spare(self, indices: Sequence[int]) -> bool:
        """Return whether seeking pays off for any gap between the ascending `indices`."""
        return bool((self.before(indices) - np.array([-1, *indices[:-1]]) > LEAST_SPARED).any())

    def num_decoded(self, indices: Sequence[int]) -> int:
        """Return the number of frames that must be decoded for the ascending `indices`."""
        decoded, place = 0, -1
        for index, key in zip(indices, self.before(indices).tolist(), strict=True):
            decoded += index - (key - 1 if key - place > LEAST_SPARED else place)
            place = index
        return decoded


def sought(
    container: InputContainer, stream: VideoStream, keyframes: Keyframes, indices: Sequence[int], num_bytes: int
) -> Iterator[av.VideoFrame]:
    """Yield the frames at the ascending `indices`. Stop before the first frame that is not found at its exact time.

    PyAV errors are propagated unchanged.
    """
    left = 2 * len(keyframes.times)  # limit on packets, in case a wrong index leads to decoding the same parts again

    def decoded() -> Iterator[av.VideoFrame]:
        nonlocal left
        for packet in packets_of(container, stream, num_bytes):
            left -= 1
            if left < 0:
                return
            yield from packet.decode()
        yield from stream.decode(None)

    frames, frame, place = decoded(), None, -1
    for index, key in zip(indices, keyframes.before(indices).tolist(), strict=True):
        if key - place > LEAST_SPARED:
            container.seek(int(keyframes.times[key]), stream=stream)
            frames = decoded()
            frame, place = _at(frames, int(keyframes.times[key])), key
            if frame is None or not frame.key_frame:  # the container may mark any frame as a keyframe
                return
        if index > place:
            frame, place = _at(frames, int(keyframes.times[index])), index
        if frame is None:
            return
        yield frame


def _at(frames: Iterator[av.VideoFrame], time: int) -> av.VideoFrame | None:
    """Skip to the frame at `time` and return it. Return None if there is no such frame."""
    frame = next((frame for frame in frames if frame.pts is None or frame.pts >= time), None)
    return frame if frame is not None and frame.pts == time else None
