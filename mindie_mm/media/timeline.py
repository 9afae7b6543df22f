"""How many frames a video has, and when they are shown.

The frames of a video are the frames that FFmpeg decodes of it, whatever its headers state. A packet is counted for a
frame where it certainly becomes one; otherwise all are decoded once to be counted.
"""

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
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.errors import MediaError
from mindie_mm.media.bitstreams import has_fields, is_idr, is_whole
from mindie_mm.media.container import packets_of
from mindie_mm.media.segments import check_scans

AVI = "avi"
"""FFmpeg's name of the container whose frames have no times: each chunk lasts as long, empty ones repeat a frame."""
PLACEHOLDER = 2**30
"""Frames that FFmpeg states in an AVI written to a pipe; a film of so many would last a year."""
_ONE_FRAME_EACH = frozenset(
    ["h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mjpeg", "prores", "dnxhd", "ffv1", "huffyuv", "rawvideo"]
)
"""Decoders that make one frame of each packet. Others may make none, of a frame that repeats the one before."""
_LONGEST_TAIL = 32
"""Most packets of a damaged tail, which are a tenth of all at most: what is missing of a film would go unnoticed."""
_LONGEST_PAUSE_S = 10.0
"""Between two frames of an MPEG stream; a longer one is where captures were joined, as for the ffmpeg program."""
_ROUNDING = 2
"""Most units of the time base by which the rounded times of frames may differ from a constant rate."""


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
    """What is known of a stream once its packets were read."""

    number: int
    times: NDArray[np.int64] | None
    """[packets that are shown], ascending, in the stream's time base; None where some are not stated, or go back."""
    num_shown: int
    are_frames: bool
    """Whether each that is shown certainly becomes a frame."""
    key_times: Sequence[int]
    """Times of keyframes from which on nothing refers to what was before, in the order of decoding."""
    end: int
    """When the last one that is shown ends."""
    num_chunks: int
    """Chunks of an AVI from the first to the last that is not empty."""

    @classmethod
    def read(
        cls, packets: Iterable[av.Packet[VideoStream]], context: av.CodecContext, max_packets: int, max_pixels: int
    ) -> Packets:
        """Read one packet more than `max_packets` at most.

        LimitExceeded for a JPEG of more scans than `max_pixels` allow.
        """
        side = math.isqrt(max_pixels)  # whatever the container states: a JPEG has its own size
        codec, extradata = context.name, context.extradata
        is_h264 = codec == "h264"
        are_frames = codec in _ONE_FRAME_EACH and not (is_h264 and has_fields(None, extradata))
        number = num_shown = 0
        in_order = True
        key_time = None
        times, key_times = array("q"), array("q")
        last = last_shown = end = -(2**63)
        first = 2**63
        for packet in islice(packets, max_packets + 1):
            number += 1
            if codec == "mjpeg":
                check_scans(bytes(packet), side, side)
            time, decoded_at = packet.pts, packet.dts
            if decoded_at is not None:
                first, last = min(first, decoded_at), max(last, decoded_at)
            is_new = packet.is_keyframe and (not is_h264 or is_idr(memoryview(packet), extradata))
            if packet.is_keyframe and is_h264 and are_frames:
                are_frames = not has_fields(memoryview(packet), extradata)
            if number == 1:
                key_time, are_frames = time, are_frames and is_new
            # What an edit list hides is decoded for the sake of others, and so is a frame of VP8 without this bit.
            if packet.is_discard or (codec == "vp8" and not memoryview(packet)[0] & 0x10):
                continue
            num_shown += 1
            are_frames = are_frames and not packet.is_corrupt and is_whole(memoryview(packet), codec, extradata)
            if time is None or (decoded_at is not None and decoded_at < last_shown):
                in_order = False
                continue
            # A picture shown before the first keyframe may refer to what was cut off.
            are_frames = are_frames and key_time is not None and time >= key_time
            times.append(time)
            if is_new:
                key_times.append(time)
            end = max(end, time + (packet.duration or 0))
            last_shown = last_shown if decoded_at is None else decoded_at
        ordered = np.sort(np.array(times, np.int64)) if in_order else None
        are_frames = are_frames and ordered is not None and bool((np.diff(ordered) > 0).all())
        return cls(number, ordered, num_shown, are_frames, key_times, end, max(0, last - first + 1))


def frames_of_video(container: InputContainer, stream: VideoStream, num_bytes: int) -> Iterator[av.VideoFrame]:
    """Yield the frames of `stream`. Raise what PyAV raises, but for errors before the first frame.

    A stream that was cut begins with pictures that refer to what is gone. LimitExceeded as `packets_of`.
    """
    has_begun = False
    for packet in packets_of(container, stream, num_bytes):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            if has_begun:
                raise
            continue
        has_begun = has_begun or bool(frames)
        yield from frames
    yield from stream.decode(None)


def decoded_times(container: InputContainer, stream: VideoStream, num_bytes: int, num_packets: int) -> list[int | None]:
    """Decode all frames of `num_packets` packets and return their times.

    A damaged tail has no frames: they end before the first error, as PyAV and torchcodec decode. MediaError where more
    than a tail follows on it, and would be left out.
    """
    times: list[int | None] = []
    most_behind = min(_LONGEST_TAIL, max(1, num_packets // 10))
    num_behind, is_damaged = 0, False
    for packet in packets_of(container, stream, num_bytes):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            frames, is_damaged = [], is_damaged or bool(times)
        num_behind += is_damaged
        if num_behind > most_behind:
            raise MediaError(f"the video is broken: of its {num_packets} packets only {len(times)} frames decode")
        if not is_damaged:
            times += [frame.pts for frame in frames]
    if not is_damaged:
        with suppress(av.InvalidDataError):
            times += [frame.pts for frame in stream.decode(None)]
    return times


def rate_of(
    stream: VideoStream, container: str, packets: Packets, times: NDArray[np.int64] | None, num_frames: int
) -> Fraction | None:
    """Return the frames per second of `num_frames` frames at `times`, which ascend; None where nothing says it.

    As in torchcodec the times of frames count: frames by the time from the first one's beginning to the last one's end.
    What a container states is no more than a hint, which players of Matroska pass over. It is returned where the times
    are those of such a rate, rounded: it has no rounding.
    """
    stated, time_base = stream.average_rate, stream.time_base
    if container == AVI:
        chunks = stream.frames if packets.number <= stream.frames < PLACEHOLDER else packets.num_chunks
        return stated * Fraction(num_frames, chunks) if stated and chunks else stated
    if not time_base or times is None or not len(times) or packets.end <= times[0]:
        return stated
    if container in ("mpegts", "mpeg") and np.diff(times).max(initial=0) * time_base > _LONGEST_PAUSE_S:
        return stated
    lasts = int(times[-1] - times[0]) * time_base
    if stated and abs((len(times) - 1) / stated - lasts) <= _ROUNDING * time_base:
        return stated
    return len(times) / ((packets.end - int(times[0])) * time_base)
