"""Number and presentation times of the frames of a video.

The frames of a video are the frames that FFmpeg decodes, even if the headers state another number. If each packet is
certain to become one frame, the packets are counted. Otherwise all packets are decoded once to count the frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from operator import add

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.errors import MediaError
from mindie_mm.media.guard.container import packets_of
from mindie_mm.media.guard.segments import check_scans
from mindie_mm.media.video.alpha_track import AlphaTrack, has_alpha_track
from mindie_mm.media.video.bitstreams import has_fields, is_idr, is_one_picture, is_whole

AVI = "avi"
"""FFmpeg's name for AVI. Its frames have no timestamps. All chunks have the same duration, and an empty chunk repeats a
frame."""
PLACEHOLDER = 2**30
"""Frame count that FFmpeg writes to the header of an AVI if the output is a pipe. Real videos have fewer frames."""
_ONE_FRAME_EACH = frozenset(
    [
        *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mjpeg", "prores", "dnxhd", "ffv1", "huffyuv", "rawvideo"),
        *("mpeg1video", "mpeg2video", "mpeg4", "h263", "flv", "msmpeg4v1", "msmpeg4v2", "msmpeg4", "wmv1", "wmv2"),
    ]
)
"""Decoders that produce one frame per packet, if the packet contains one picture (`is_one_picture`).

Other decoders produce no frame if a packet repeats the previous frame.
"""
_ROUNDED_TIMES = frozenset({("asf", "mpeg1video"), ("asf", "mpeg2video")})
"""Containers and decoders for which FFmpeg computes other times for packets than for the frames in them."""
_LONGEST_TAIL = 32
"""Maximum number of packets that may be damaged or missing at the end of a video.

A second limit is a tenth of all packets. With a higher limit, a large missing part of a video would not be noticed.
"""
_LONGEST_PAUSE_S = 10.0
"""Maximum pause in seconds between frames of an MPEG stream. After a longer pause, another recording begins."""
_ROUNDING = 2
"""Maximum difference, in units of the time base, between rounded frame times and times at a constant rate."""

_NO_TIME = -(2**63)
"""FFmpeg's value for an unknown time."""
_FACTS = np.dtype(
    [("time", "i8"), ("decoded_at", "i8"), ("duration", "i8"), ("is_shown", "?"), ("starts", "?"), ("is_frame", "?")]
)
"""Fields for each packet.

`time` is the presentation time and `decoded_at` the decoding time, in units of the time base. `starts` is true if
neither this picture nor a later picture refers to an earlier picture. `is_frame` is false if the packet may become no
frame, or only half a frame.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
    """Facts about a video stream that can be read from its packets without decoding."""

    number: int
    """Number of packets."""
    times: NDArray[np.int64] | None
    """Ascending presentation times of the packets whose picture is shown, [num_shown], in units of the time base.

    None if a time is missing, or if decoding times do not ascend.
    """
    num_shown: int
    """Number of packets whose picture is shown."""
    are_frames: bool
    """True if each packet whose picture is shown certainly becomes one frame."""
    key_times: NDArray[np.int64]
    """Presentation times of keyframes in decoding order.

    Pictures at or after a keyframe do not refer to pictures before it.
    """
    end: int
    """Time at which the last picture ends, in units of the time base."""
    num_chunks: int
    """Number of AVI chunks from the first to the last chunk that is not empty."""

    @classmethod
    def read(
        cls, packets: Iterable[av.Packet[VideoStream]], context: av.CodecContext, max_packets: int, max_pixels: int
    ) -> Packets:
        """Read at most `max_packets` + 1 packets.

        Raises:
            LimitExceeded: A JPEG frame has more scans than `max_pixels` allows.

        """
        side = math.isqrt(max_pixels)  # the size in the container may differ from the size of each JPEG
        codec, extradata = context.name, context.extradata
        read = islice(packets, max_packets + 1)
        facts = np.fromiter((_facts(packet, codec, extradata, side) for packet in read), _FACTS)
        shown = facts[facts["is_shown"]]
        timed = shown[shown["time"] != _NO_TIME]
        decoded_at = timed["decoded_at"]
        timed = timed[(decoded_at == _NO_TIME) | (decoded_at >= np.maximum.accumulate(decoded_at))]
        times, first = np.sort(timed["time"]), facts[:1]
        in_order = len(timed) == len(shown)
        are_frames = (
            codec in _ONE_FRAME_EACH
            and not (codec == "h264" and has_fields(None, extradata))
            and in_order
            and bool(facts["is_frame"].all() and (np.diff(times) > 0).all())
            # A picture that is shown before the first keyframe may refer to a picture that was cut off.
            and bool(first["starts"].all() and (first["time"] != _NO_TIME).all() and (times >= first["time"]).all())
        )
        ends = map(add, timed["time"].tolist(), timed["duration"].tolist())  # Python's integers do not overflow
        chunks = facts["decoded_at"][facts["decoded_at"] != _NO_TIME].tolist()
        return cls(
            number=len(facts),
            times=times if in_order else None,
            num_shown=len(shown),
            are_frames=are_frames,
            key_times=timed["time"][timed["starts"]],
            end=max(ends, default=_NO_TIME),
            num_chunks=max(chunks) - min(chunks) + 1 if chunks else 0,
        )


def _facts(
    packet: av.Packet[VideoStream], codec: str, extradata: bytes | None, side: int
) -> tuple[int, int, int, bool, bool, bool]:
    """Return the row of `_FACTS` for a packet. Raise LimitExceeded if a JPEG has too many scans."""
    data, is_h264 = memoryview(packet), codec == "h264"
    if codec == "mjpeg":
        check_scans(bytes(packet), side, side)
    # Frames that an edit list hides, and VP8 frames without the show bit, are decoded only as references.
    is_shown = not packet.is_discard and (codec != "vp8" or bool(data[0] & 0x10))
    is_frame = not (is_h264 and packet.is_keyframe and has_fields(data, extradata))
    if is_shown:
        is_frame = is_frame and not packet.is_corrupt and is_whole(data, codec, extradata)
        is_frame = is_frame and is_one_picture(data, codec)
    return (
        _NO_TIME if packet.pts is None else packet.pts,
        _NO_TIME if packet.dts is None else packet.dts,
        packet.duration or 0,
        is_shown,
        packet.is_keyframe and (not is_h264 or is_idr(data, extradata)),
        is_frame,
    )


def frames_of_video(container: InputContainer, stream: VideoStream, num_bytes: int) -> Iterator[av.VideoFrame]:
    """Yield the frames of `stream`.

    Errors before the first frame are ignored, because a stream that was cut begins with pictures whose references are
    missing. Later PyAV errors are propagated unchanged.

    Raises:
        LimitExceeded: In the same cases as `packets_of`.

    """
    has_begun = False
    alpha = AlphaTrack(stream) if has_alpha_track(stream) else None
    for packet in packets_of(container, stream, num_bytes):
        try:
            frames = packet.decode()
            if alpha is not None:
                alpha.read(packet)
        except av.InvalidDataError:
            if has_begun:
                raise
            continue
        has_begun = has_begun or bool(frames)
        yield from frames if alpha is None else map(alpha.merged, frames)
    yield from stream.decode(None) if alpha is None else map(alpha.merged, stream.decode(None))


def has_exact_times(container: str, codec: str) -> bool:
    """Return whether packets have the times of the frames that are decoded from them."""
    return (container, codec) not in _ROUNDED_TIMES


def longest_tail(num_packets: int) -> int:
    """Return how many packets at the end of a video may be damaged or missing: a tenth, but at least 1, at most 32."""
    return min(_LONGEST_TAIL, max(1, num_packets // 10))


def decoded_times(container: InputContainer, stream: VideoStream, num_bytes: int, num_packets: int) -> list[int | None]:
    """Decode all frames of `num_packets` packets and return their presentation times.

    Frames after the first error are left out, as in PyAV and torchcodec.

    Raises:
        MediaError: More than `longest_tail` packets follow the first error.

    """
    times: list[int | None] = []
    most_behind = longest_tail(num_packets)
    num_behind, is_damaged = 0, False
    for packet in packets_of(container, stream, num_bytes):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            frames, is_damaged = [], is_damaged or bool(times)
        num_behind += is_damaged
        if num_behind > most_behind:
            raise MediaError(
                f"the video is broken: only {len(times)} frames could be decoded from its {num_packets} packets"
            )
        if not is_damaged:
            times += [frame.pts for frame in frames]
    if not is_damaged:
        with suppress(av.InvalidDataError):
            times += [frame.pts for frame in stream.decode(None)]
    return times


def rate_of(
    stream: VideoStream, container: str, packets: Packets, times: NDArray[np.int64] | None, num_frames: int
) -> Fraction | None:
    """Return the frame rate of `num_frames` frames at ascending `times`, or None if the rate is unknown.

    As in torchcodec, the rate is the number of frames divided by the time from the start of the first frame to the end
    of the last frame. The rate that a container states is only a hint, which Matroska players ignore. If the rounded
    times match the stated rate, the stated rate is returned, because it is exact.
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
