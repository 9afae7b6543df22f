"""Decoding of videos through PyAV: only the sampled frames become RGB, and what is far from them is passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.config import MediaCaps
from mindie_mm.errors import FramesMiscounted, InputError, LimitExceeded, MediaError, naming
from mindie_mm.media import cancellation, seek
from mindie_mm.media.caps import Work, decodes_to_count, work
from mindie_mm.media.container import (
    best_stream,
    check_codec,
    coded_pixels,
    open_container,
    packets_of,
    reading,
)
from mindie_mm.media.display_matrix import Orientation
from mindie_mm.media.image import Data, Frames, Pixels, open_image
from mindie_mm.media.sample_tables import may_be_turned
from mindie_mm.media.seek import Keyframes
from mindie_mm.media.timeline import AVI, PLACEHOLDER, Packets, decoded_times, frames_of_video, rate_of

CONTAINERS = ("mov", "matroska", "avi", "asf", "mpegts", "flv", "mpeg", "gif", "dv", "ogg", "ivf")
"""Containers that are opened, told by content (mov is MP4 too, matroska WebM too; mpeg is program streams). Playlists
are none of them: they would make the library open files and addresses of the client's choice."""
_FEW_FRAMES = 64
"""Frames that are decoded to the end of a video to find out whether it is whole, however few are taken."""


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video whose container was read, and checked against the caps, but that is not decoded yet."""

    height: int
    """Pixels of an upright frame."""
    width: int
    num_frames: int
    """Frames that FFmpeg decodes of the file."""
    fps: float | None
    """Mean frames per second; None where neither the container nor the frames' times say it."""
    orientation: Orientation
    """What makes a frame upright."""
    data: bytes
    max_pixels: int
    """Of a frame, whatever the container states."""
    keyframes: Keyframes | None
    """None where only the whole can be decoded."""
    is_counted: bool
    """Whether `num_frames` is a count of packets, not of frames that were decoded."""
    work: Work
    """The request's, of which it is a part."""

    @classmethod
    def open(cls, data: bytes) -> EncodedVideo:
        """Read the container of `data`. Decode one frame of what is turned, all of what packets do not count.

        MediaError, LimitExceeded.
        """
        of_request = work()
        limits = of_request.caps
        max_pixels, max_frames = limits.max_video_pixels, limits.max_video_frames
        with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
            stream = best_stream(container, "video")
            check_codec(stream.codec_context, "the video")
            height, width, stated, name = stream.height, stream.width, stream.frames, container.format.name
            _check_size(height, width, max_pixels)
            packets = Packets.read(
                packets_of(container, stream, len(data)), stream.codec_context, max_frames, max_pixels
            )
            if packets.number > max_frames:
                _check_length(max(packets.number, stated if stated < PLACEHOLDER else 0), None, limits)
            if _is_cut(stream, name, packets.number, data):
                raise MediaError(f"the video is truncated: it states {stated} frames and holds {packets.number}")
            if not (height and width):  # unknown; FFmpeg does not look into frames that are above the limit
                raise LimitExceeded(f"the video's frames have no size, or more than the limit of {max_pixels} pixels")
            num_frames, times = packets.num_shown, packets.times
            is_counted = packets.are_frames and not decodes_to_count()
            if num_frames and not is_counted:
                of_request.add_video(packets.number * height * width)
                num_frames, times = _decoded(data, max_pixels, packets.number)
                if not num_frames:
                    raise MediaError(f"the video is broken: of its {packets.number} packets none can be decoded")
            if not num_frames:
                raise MediaError("the video has no frames")
            rate = rate_of(stream, name, packets, times, num_frames)
        fps = float(rate) if rate else None
        _check_length(num_frames, fps, limits)
        orientation = _orientation(data, max_pixels)
        if orientation.transposed:
            height, width = width, height
        keyframes = None
        if times is not None and name in seek.CONTAINERS:
            keyframes = Keyframes.of(times, packets.key_times)
        return cls(height, width, num_frames, fps, orientation, data, max_pixels, keyframes, is_counted, of_request)

    def count(self, indices: Sequence[int]) -> None:
        """Count the pixels that `decode` takes, before anything is decoded.

        LimitExceeded for more than a request may take.
        """
        self.work.add_video(self._num_decoded(indices) * self.height * self.width)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield a frame for each of `indices`, which ascend: uint8 [height, width, 3], RGB, scaled if of another size.

        Frames far from these stay undecoded where the file can be sought in. MediaError if the video breaks off before
        the last of them, LimitExceeded for a frame above the limit. FramesMiscounted where the video has more frames or
        fewer than its packets told: it is read on to its end, whichever frames a family takes.
        """
        taken = 0

        def broken() -> MediaError:
            kind = FramesMiscounted if self.is_counted else MediaError
            decoded = min(taken, len(indices))
            return kind(f"the video is broken: of {len(indices)} sampled frames {decoded} can be decoded")

        scaler = VideoReformatter()  # one for all frames: to set it up takes longer than to scale a small frame
        wanted = self._up_to_end(indices)
        with reading(broken):
            for frame in self._found(wanted):
                if taken < len(indices):
                    yield self._upright(frame, scaler)
                taken += 1
        if taken < len(wanted):
            raise broken()

    def _found(self, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the frames of `indices` up to the first that is not there. Raise what PyAV raises; FramesMiscounted."""
        taken = 0
        for frame in self._sought(indices):
            yield frame
            taken += 1
        if taken == len(indices):
            return
        if self.keyframes is not None and self.keyframes.spare(indices):  # only what seeking takes was counted
            self.work.add_video((indices[-1] + 1) * self.height * self.width)
        with open_container(self.data, CONTAINERS, self.max_pixels) as container:
            stream = _stream_to_decode(container, self.max_pixels)
            for index, frame in enumerate(frames_of_video(container, stream, len(self.data))):
                if index == self.num_frames:
                    raise FramesMiscounted(f"the video has more frames than its packets told, which are {index}")
                while taken < len(indices) and index == indices[taken]:
                    yield frame
                    taken += 1
                is_last = self.is_counted and index + 1 == self.num_frames
                if taken == len(indices) and not is_last:
                    return

    def _num_decoded(self, indices: Sequence[int]) -> int:
        return indices[-1] + 1 if self.keyframes is None else self.keyframes.num_decoded(indices)

    def _up_to_end(self, indices: Sequence[int]) -> Sequence[int]:
        """Return `indices` and the last frame, unless reading on to it takes longer than to read as far as they are."""
        wanted = [*indices, self.num_frames - 1]
        before = self._num_decoded(indices)
        further = self._num_decoded(wanted) - before
        num_pixels = further * self.height * self.width
        left = self.work.caps.max_request_video_pixels - self.work.video_pixels
        if not self.is_counted or further > max(before, _FEW_FRAMES) or num_pixels > left:
            return indices
        self.work.add_video(num_pixels)
        return wanted

    def _sought(self, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Frames of `indices` up to the first that seeking does not find; none where it would spare nothing."""
        if self.keyframes is None or not self.keyframes.spare(indices):
            return
        with (
            suppress(av.FFmpegError, ValueError, OSError),
            open_container(self.data, CONTAINERS, self.max_pixels) as container,
        ):
            stream = _stream_to_decode(container, self.max_pixels)
            yield from seek.sought(container, stream, self.keyframes, indices, len(self.data))

    def _upright(self, frame: av.VideoFrame, scaler: VideoReformatter) -> Pixels:
        _check_size(frame.height, frame.width, self.max_pixels)
        height, width = (self.width, self.height) if self.orientation.transposed else (self.height, self.width)
        pixels = scaler.reformat(frame, width, height, "rgb24").to_ndarray()
        return self.orientation.apply(pixels.astype(np.uint8, copy=False))


@dataclass(frozen=True, slots=True, eq=False)
class SampledVideo:
    """Frames handed in, behind the face of an EncodedVideo; whoever hands them in has sampled them."""

    height: int
    """Pixels, of each frame."""
    width: int
    fps: float | None
    """Frames per second that they were sampled at; None: not known."""
    frames: Frames | Pixels

    @classmethod
    def open(cls, frames: Frames | Pixels, fps: float | None) -> SampledVideo:
        """Reads the headers of those that are encoded. InputError where sizes differ, MediaError, LimitExceeded."""
        limits = work().caps
        sizes: list[tuple[int, int]] = []
        _check_length(len(frames), fps, limits)
        for index, frame in enumerate(frames if isinstance(frames, tuple) else frames[:1]):
            with naming(f"frame {index}"):
                picture = open_image(frame)
                sizes.append((picture.height, picture.width))
                _check_size(*sizes[index], limits.max_video_pixels)
            if sizes[index] != sizes[0]:
                (height, width), (first_height, first_width) = sizes[index], sizes[0]
                raise InputError(
                    f"frame {index} is {width}x{height} pixels, frame 0 is {first_width}x{first_height}: "
                    "the frames of a video are of one size"
                )
        return cls(*sizes[0], fps, frames)

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    def count(self, indices: Sequence[int]) -> None:
        """Nothing: each image was counted as it was opened, and pixels handed in need no decoding."""

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Frames uint8 [height, width, 3], RGB, one per index. MediaError for a broken image."""
        for index in indices:
            cancellation.check()
            with naming(f"frame {index}"):
                pixels = open_image(self.frames[index]).decode()  # anew: an index may come twice
            yield pixels


Video = EncodedVideo | SampledVideo
"""Either."""


def open_video(data: Data, sample_fps: float | None) -> Video:
    """Frame count and size of `data` now, its frames when asked for. `sample_fps` is that of frames handed in.

    InputError, MediaError, LimitExceeded.
    """
    if not isinstance(data, bytes):
        return SampledVideo.open(data, sample_fps)
    if sample_fps is not None:
        raise InputError(f"sample_fps {sample_fps:g} is given of an encoded video, which states its own rate")
    return EncodedVideo.open(data)


def _is_cut(stream: VideoStream, container: str, num_packets: int, data: bytes) -> bool:
    """Return whether the file ends before the packets do that it states.

    Fewer packets than a container states may be all: edits leave some out of FFmpeg's index, AVI repeats a frame by an
    empty chunk, and an AVI written to a pipe holds placeholders.
    """
    if num_packets >= stream.frames:
        return False
    if container == AVI:
        num_bytes = int.from_bytes(data[4:8], "little") + 8
        return stream.frames < PLACEHOLDER and len(data) < num_bytes < 2**32
    return num_packets < sum(entry.size > 0 for entry in islice(stream.index_entries, stream.frames))


def _decoded(data: bytes, max_pixels: int, num_packets: int) -> tuple[int, NDArray[np.int64] | None]:
    """Decode all frames; return their number, and their times unless some are not known or go back. MediaError."""
    with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
        found = decoded_times(container, _stream_to_decode(container, max_pixels), len(data), num_packets)
    known = [time for time in found if time is not None]
    times = np.array(known, np.int64)
    return len(found), times if len(known) == len(found) and (np.diff(times) > 0).all() else None


def _orientation(data: bytes, max_pixels: int) -> Orientation:
    """Return how the frames of `data` are laid to be upright. MediaError."""
    if not may_be_turned(data):
        return Orientation()
    with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
        for frame in frames_of_video(container, _stream_to_decode(container, max_pixels), len(data)):
            return Orientation.of(frame)
    return Orientation()


def _stream_to_decode(container: InputContainer, max_pixels: int) -> VideoStream:
    stream: VideoStream = best_stream(container, "video")
    stream.codec_context.options = {"max_pixels": str(coded_pixels(max_pixels))}
    stream.thread_type = "AUTO"
    # FFmpeg's threads of HEVC wait for each other's frames, and where a file is damaged they may wait for ever.
    stream.codec_context.thread_count = 1 if stream.codec_context.name == "hevc" else torch.get_num_threads()
    return stream


def _unreadable(data: bytes) -> MediaError:
    return MediaError(f"the {len(data)} bytes are no readable video ({', '.join(CONTAINERS)})")


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise LimitExceeded(f"the video has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")


def _check_length(num_frames: int, fps: float | None, limits: MediaCaps) -> None:
    if num_frames > limits.max_video_frames:
        raise LimitExceeded(f"the video has {num_frames} frames; the limit is {limits.max_video_frames}")
    if fps and num_frames / fps > limits.max_video_seconds:
        raise LimitExceeded(f"the video lasts {num_frames / fps:.1f} s; the limit is {limits.max_video_seconds:g} s")
