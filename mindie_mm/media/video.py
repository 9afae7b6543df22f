"""Decoding of videos through PyAV: only the sampled frames become RGB, and what is far from them is passed over."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.config import MediaCaps
from mindie_mm.errors import InputError, LimitExceeded, MediaError, naming
from mindie_mm.media import cancellation, seek
from mindie_mm.media.caps import Work, work
from mindie_mm.media.container import (
    best_stream,
    check_codec,
    coded_pixels,
    frames_of,
    open_container,
    packets_of,
    reading,
)
from mindie_mm.media.image import Data, Frames, Pixels, open_image
from mindie_mm.media.sample_tables import may_be_turned
from mindie_mm.media.seek import Keyframes, begins_anew
from mindie_mm.media.segments import check_scans

CONTAINERS = ("mov", "matroska", "avi", "asf", "mpegts", "flv", "mpeg")
"""Containers that are opened, told by content (mov is MP4 too, matroska WebM too; mpeg is program streams). Playlists
are none of them: they would make the library open files and addresses of the client's choice."""
_RATE_TOLERANCE = 0.02
"""Share of a video's length by which its frames' times may differ from the rate that its container states."""
_LONGEST_PAUSE_S = 10.0
"""Between two frames of an MPEG stream; a longer one is where captures were joined, as for the ffmpeg program."""


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video whose container was read, and checked against the caps, but that is not decoded yet."""

    height: int
    """Pixels, upright: after the display rotation."""
    width: int
    num_frames: int
    """Frames of the video, all of them."""
    fps: float | None
    """Mean frames per second; None where neither the container nor the frames' times say it."""
    turns: int
    """Quarter turns, counter-clockwise, that make a frame upright; 0 to 3."""
    data: bytes
    max_pixels: int
    """Of a frame, whatever the container states."""
    keyframes: Keyframes | None
    """None where only the whole can be decoded."""
    work: Work
    """The request's, of which it is a part."""

    @classmethod
    def open(cls, data: bytes) -> EncodedVideo:
        """Reads the container of `data`; decodes one frame, of what is turned. MediaError, LimitExceeded."""
        of_request = work()
        limits = of_request.caps
        max_pixels, max_frames = limits.max_video_pixels, limits.max_video_frames
        with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
            stream = best_stream(container, "video")
            check_codec(stream.codec_context, "the video")
            height, width, stated = stream.height, stream.width, stream.frames
            _check_size(height, width, max_pixels)
            is_avi = container.format.name == "avi"
            packets = packets_of(container, stream, len(data))
            walk = _walk(packets, stream.codec_context, max_frames, max_pixels)
            # Fewer packets than the container states may be all: edits leave some out of FFmpeg's index, and AVI
            # repeats a frame by an empty chunk.
            is_cut = walk.packets < stated and (
                (is_avi and int.from_bytes(data[4:8], "little") + 8 > len(data))
                or walk.packets < sum(entry.size > 0 for entry in islice(stream.index_entries, max_frames + 1))
            )
            rate = _rate(stream, walk, container.format.name)
            can_seek = container.format.name in seek.CONTAINERS
        if walk.packets > max_frames:
            _check_length(max(stated, walk.packets), None, limits)
        if is_cut:
            raise MediaError(f"the video is truncated: it states {stated} frames and holds {walk.packets}")
        if not (height and width):  # unknown; FFmpeg does not look into frames that are above the limit
            raise LimitExceeded(f"the video's frames have no size, or more than the limit of {max_pixels} pixels")
        # Where the container counts its frames, its count is the one that samplers go by, unless an edit hides some.
        num_frames = min(stated or walk.shown, walk.shown - walk.early)
        if not num_frames:
            raise MediaError("the video has no frames")
        if is_avi and rate and stated:  # of its frames and of the empty chunks that repeat them
            rate *= Fraction(num_frames, stated)
        fps = float(rate) if rate else None
        _check_length(num_frames, fps, limits)
        turns = _turns(data, max_pixels)
        if turns % 2:
            height, width = width, height
        keyframes = walk.keyframes if can_seek else None
        return cls(height, width, num_frames, fps, turns, data, max_pixels, keyframes, of_request)

    def count(self, indices: Sequence[int]) -> None:
        """Counts what `decode` takes before anything is decoded. LimitExceeded for more than a request may take."""
        num_frames = indices[-1] + 1 if self.keyframes is None else self.keyframes.num_decoded(indices)
        self.work.add_video(num_frames * self.height * self.width)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Frames uint8 [height, width, 3], RGB, one per index; `indices` ascend. Frames of other sizes are scaled.

        MediaError if the video breaks off before the last of them, LimitExceeded for a frame above the limit. What
        lies far between them stays undecoded where the file is one that can be sought in.
        """
        taken = 0

        def broken() -> MediaError:
            return MediaError(f"the video is broken: of {len(indices)} sampled frames {taken} can be decoded")

        scaler = VideoReformatter()  # one for all frames: to set it up takes longer than to scale a small frame
        with reading(broken):
            for frame in self._sought(indices):
                yield self._upright(frame, scaler)
                taken += 1
            if taken == len(indices):
                return
            if self.keyframes is not None and self.keyframes.spare(indices):  # only what seeking takes was counted
                self.work.add_video((indices[-1] + 1) * self.height * self.width)
            with open_container(self.data, CONTAINERS, self.max_pixels) as container:
                stream = _stream_to_decode(container, self.max_pixels)
                for index, frame in enumerate(frames_of(container, stream, len(self.data))):
                    while taken < len(indices) and index == indices[taken]:
                        yield self._upright(frame, scaler)
                        taken += 1
                    if taken == len(indices):
                        return
        raise broken()

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
        height, width = (self.width, self.height) if self.turns % 2 else (self.height, self.width)
        pixels = scaler.reformat(frame, width, height, "rgb24").to_ndarray()
        return np.ascontiguousarray(np.rot90(pixels, self.turns), np.uint8)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """What is known of a stream once its packets were read."""

    packets: int
    shown: int
    """Packets that become frames which are shown."""
    early: int
    """Of `shown`, those that refer to what was cut off before the first keyframe; no decoder gives them."""
    times: NDArray[np.int64] | None
    """[shown - early], ascending, in the stream's time base; None where some are not stated, or go back."""
    end: int
    """When the last of them ends."""
    keyframes: Keyframes | None


def _walk(
    packets: Iterable[av.Packet[VideoStream]], context: av.CodecContext, max_packets: int, max_pixels: int
) -> _Walk:
    """Takes at most one more than `max_packets`. LimitExceeded for a frame of more scans than `max_pixels` allow."""
    side = math.isqrt(max_pixels)  # whatever the container states: a JPEG has its own size
    num_packets = num_shown = num_early = 0
    key_time, is_early, in_order = None, True, True
    last = end = -(2**63)
    times, key_times = array("q"), array("q")
    codec, extradata = context.name, context.extradata
    for packet in islice(packets, max_packets + 1):
        num_packets += 1
        if codec == "mjpeg":
            check_scans(bytes(packet), side, side)
        time, decoded_at = packet.pts, packet.dts
        if is_first_key := key_time is None and packet.is_keyframe:
            key_time = time or 0
        # What an edit list hides is decoded for the sake of others, and so is a frame of VP8 without this bit.
        if packet.is_discard or (codec == "vp8" and not memoryview(packet)[0] & 0x10):
            continue
        num_shown += 1
        if is_early and not is_first_key:
            is_early = key_time is None or (time is not None and time < key_time)
            num_early += is_early
        if time is None or (decoded_at is not None and decoded_at < last):
            in_order = False
        else:
            times.append(time)
            if packet.is_keyframe and begins_anew(packet, codec, extradata):
                key_times.append(time)
            end = max(end, time + (packet.duration or 0))
            last = last if decoded_at is None else decoded_at
    if key_time is None:
        num_early = 0
    ordered = np.sort(np.array(times, np.int64))[num_early:] if in_order else None
    keyframes = Keyframes.of(ordered, key_times) if ordered is not None and not num_early else None
    return _Walk(num_packets, num_shown, num_early, ordered, end, keyframes)


def _rate(stream: VideoStream, walk: _Walk, container: str) -> Fraction | None:
    """Frames per second: what the container states, unless the frames' times tell otherwise, which are then believed.

    Without a rate in the container FFmpeg makes one of the first few frames. As torchcodec, frames by the time from the
    first one's beginning to the last one's end.
    """
    stated, time_base, times = stream.average_rate, stream.time_base, walk.times
    if container == "avi" or not time_base or times is None or not len(times) or walk.end <= times[0]:
        return stated  # an AVI has no times, only its rate
    if container in ("mpegts", "mpeg") and np.diff(times).max(initial=0) * time_base > _LONGEST_PAUSE_S:
        return stated
    lasts = int(times[-1] - times[0]) * time_base
    if stated and abs((len(times) - 1) / stated - lasts) <= _RATE_TOLERANCE * len(times) / stated + 2 * time_base:
        return stated
    return len(times) / ((walk.end - int(times[0])) * time_base)


def _turns(data: bytes, max_pixels: int) -> int:
    """Quarter turns, counter-clockwise, that make the frames of `data` upright, as torchcodec. MediaError."""
    if not may_be_turned(data):
        return 0
    with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
        for frame in frames_of(container, _stream_to_decode(container, max_pixels), len(data)):
            # A matrix of zeros has no angle, and FFmpeg's number for it is none.
            return round(frame.rotation / 90) % 4 if abs(frame.rotation) <= 180 else 0
    return 0


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
