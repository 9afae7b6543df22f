"""Decoding of videos through PyAV: one pass, and only the sampled frames become RGB."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import av
import numpy as np
import torch
from av.video.stream import VideoStream

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.caps import caps
from mindie_mm.media.container import check_codec, coded_pixels, frames_of, open_container, packets_of
from mindie_mm.media.image import Data, Pixels
from mindie_mm.media.segments import check_scans

CONTAINERS = ("mov", "matroska", "avi", "asf", "mpegts", "flv")
"""Containers that are opened, told by content (mov is MP4 too, matroska WebM too). Playlists are none of them: they
would make the library open files and addresses of the client's choice."""


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video whose container was read, and checked against the caps, but that is not decoded yet."""

    height: int
    """Pixels, as coded: as in transformers, a display rotation is not applied."""
    width: int
    num_frames: int
    """Frames of the video, all of them."""
    fps: float | None
    """Mean frames per second; None where the container does not say."""
    data: bytes
    max_pixels: int
    """Of a frame, whatever the container states."""

    @classmethod
    def open(cls, data: bytes) -> EncodedVideo:
        """Reads the container of `data`; decodes nothing. MediaError for what is no video, LimitExceeded."""
        limits = caps()
        max_pixels, max_frames, max_s = limits.max_video_pixels, limits.max_video_frames, limits.max_video_seconds
        try:
            with open_container(data, CONTAINERS, max_pixels) as container:
                if not container.streams.video:
                    raise MediaError("the file has no video stream")
                stream = container.streams.video[0]
                check_codec(stream.codec_context, "the video")
                height, width, rate = stream.height, stream.width, stream.average_rate
                stated = stream.frames
                _check_size(height, width, max_pixels)
                is_avi = container.format.name == "avi"
                packets = packets_of(container, stream, len(data))
                counts = _count(packets, stream.codec_context.name, max_frames, max_pixels)
                # Fewer packets than the container states may be all: edits leave some out of FFmpeg's index, and AVI
                # repeats a frame by an empty chunk.
                is_cut = counts.packets < stated and (
                    (is_avi and int.from_bytes(data[4:8], "little") + 8 > len(data))
                    or counts.packets < sum(entry.size > 0 for entry in islice(stream.index_entries, max_frames + 1))
                )
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError, OSError):
            raise MediaError(f"the {len(data)} bytes are no readable video ({', '.join(CONTAINERS)})") from None
        if counts.packets > max_frames:
            raise LimitExceeded(f"the video has {max(stated, counts.packets)} frames; the limit is {max_frames}")
        if is_cut:
            raise MediaError(f"the video is truncated: it states {stated} frames and holds {counts.packets}")
        if not (height and width):  # unknown; FFmpeg does not look into frames that are above the limit
            raise LimitExceeded(f"the video's frames have no size, or more than the limit of {max_pixels} pixels")
        # Where the container counts its frames, its count is the one that samplers go by, unless an edit hides some.
        num_frames = min(stated, counts.shown) if stated else counts.shown - counts.early
        if not num_frames:
            raise MediaError("the video has no frames")
        if is_avi and rate and stated:  # of its frames and of the empty chunks that repeat them
            rate *= Fraction(num_frames, stated)
        fps = float(rate) if rate else None
        if fps and num_frames / fps > max_s:
            raise LimitExceeded(f"the video lasts {num_frames / fps:.1f} s; the limit is {max_s:g} s")
        return cls(height, width, num_frames, fps, data, max_pixels)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Frames uint8 [height, width, 3], RGB, one per index; `indices` ascend. Frames of other sizes are scaled.

        MediaError if the video breaks off before the last of them, LimitExceeded for a frame above the limit.
        """
        taken = 0
        try:
            with open_container(self.data, CONTAINERS, self.max_pixels) as container:
                stream = container.streams.video[0]
                stream.codec_context.options = {"max_pixels": str(coded_pixels(self.max_pixels))}
                stream.thread_type = "AUTO"
                stream.codec_context.thread_count = torch.get_num_threads()
                for index, frame in enumerate(frames_of(container, stream, len(self.data))):
                    while taken < len(indices) and index == indices[taken]:
                        _check_size(frame.height, frame.width, self.max_pixels)
                        pixels = frame.to_ndarray(width=self.width, height=self.height, format="rgb24")
                        yield np.asarray(pixels, np.uint8)
                        taken += 1
                    if taken == len(indices):
                        return
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError, OSError):
            raise MediaError(f"the video is broken: of {len(indices)} sampled frames {taken} can be decoded") from None
        raise MediaError(f"the video is broken: of {len(indices)} sampled frames {taken} can be decoded")


@dataclass(frozen=True, slots=True, eq=False)
class DecodedVideo:
    """Frames handed in, behind the face of an EncodedVideo."""

    pixels: Pixels

    @property
    def height(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[2])

    @property
    def num_frames(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def fps(self) -> float | None:
        """None: frames handed in come without a rate."""
        return None

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Frames uint8 [height, width, 3], RGB, one per index."""
        return (self.pixels[index] for index in indices)


Video = EncodedVideo | DecodedVideo
"""Either."""


def open_video(data: Data) -> Video:
    """Frame count and size of `data` now, its frames when asked for. MediaError, LimitExceeded."""
    return EncodedVideo.open(data) if isinstance(data, bytes) else DecodedVideo(data)


@dataclass(frozen=True, slots=True)
class _Counts:
    packets: int
    shown: int
    """Packets that become frames which are shown."""
    early: int
    """Of `shown`, those that refer to what was cut off before the first keyframe; no decoder gives them."""


def _count(packets: Iterable[av.Packet[VideoStream]], codec: str, max_packets: int, max_pixels: int) -> _Counts:
    """Counts at most one more than `max_packets`. LimitExceeded for a frame of more scans than `max_pixels` allow."""
    side = math.isqrt(max_pixels)  # whatever the container states: a JPEG has its own size
    num_packets = num_shown = num_early = 0
    key_time, is_early = None, True
    for packet in islice(packets, max_packets + 1):
        num_packets += 1
        if codec == "mjpeg":
            check_scans(bytes(packet), side, side)
        # What an edit list hides is decoded for the sake of others, and so is a frame of VP8 without this bit.
        if packet.is_discard or (codec == "vp8" and not memoryview(packet)[0] & 0x10):
            continue
        num_shown += 1
        if key_time is None and packet.is_keyframe:
            key_time = packet.pts or 0
        elif is_early:
            is_early = key_time is None or (packet.pts is not None and packet.pts < key_time)
            num_early += is_early
    return _Counts(num_packets, num_shown, num_early if key_time is not None else 0)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise LimitExceeded(f"the video has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")
