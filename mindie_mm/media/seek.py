"""Decoding frames far apart without those between them: from the last keyframe before each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.media.container import packets_of

CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers in which seeking is exact, by FFmpeg's names."""
LEAST_SPARED = 8
"""Fewest frames for whose sake a decoder is emptied and begins anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Keyframes:
    """Where decoding may begin, and what is found there."""

    times: NDArray[np.int64]
    """[frames], ascending, of all frames, in the stream's time base."""
    places: NDArray[np.int64]
    """[keyframes], ascending: indices of frames that depend on none before, nor does any behind them."""

    @classmethod
    def of(cls, times: NDArray[np.int64], key_times: Sequence[int]) -> Keyframes | None:
        """From frames at `times` and keyframes at `key_times`, in the order of decoding; None unless both ascend."""
        keys = np.array(key_times, np.int64)
        if not len(times) or not len(keys) or not (np.diff(times) > 0).all() or not (np.diff(keys) > 0).all():
            return None
        return cls(times, np.flatnonzero(np.isin(times, keys)))

    def before(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The place of the last keyframe up to each of `indices`, -1 where there is none."""
        found = np.searchsorted(self.places, indices, side="right")
        return np.concatenate(([-1], self.places))[found]

    def spare(self, indices: Sequence[int]) -> bool:
        """Whether a gap between `indices`, which ascend, is worth seeking."""
        return bool((self.before(indices) - np.array([-1, *indices[:-1]]) > LEAST_SPARED).any())

    def num_decoded(self, indices: Sequence[int]) -> int:
        """Frames that are decoded for the sake of `indices`, which ascend."""
        decoded, place = 0, -1
        for index, key in zip(indices, self.before(indices).tolist(), strict=True):
            decoded += index - (key - 1 if key - place > LEAST_SPARED else place)
            place = index
        return decoded


def sought(
    container: InputContainer, stream: VideoStream, keyframes: Keyframes, indices: Sequence[int], num_bytes: int
) -> Iterator[av.VideoFrame]:
    """The frames of `indices`, which ascend; it ends before the first that is not found exactly where it should be.

    Raises what PyAV raises.
    """
    left = 2 * len(keyframes.times)  # packets: an index that leads astray costs no more than decoding all twice

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
            if frame is None or not frame.key_frame:  # the decoder's word, not the container's
                return
        if index > place:
            frame, place = _at(frames, int(keyframes.times[index])), index
        if frame is None:
            return
        yield frame


def _at(frames: Iterator[av.VideoFrame], time: int) -> av.VideoFrame | None:
    """The frame at `time`, None where there is none; those before it are passed over."""
    frame = next((frame for frame in frames if frame.pts is None or frame.pts >= time), None)
    return frame if frame is not None and frame.pts == time else None
