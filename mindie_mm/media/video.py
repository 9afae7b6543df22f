"""Decoding of videos through PyAV: one pass, and only the sampled frames become RGB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import av
import numpy as np
import torch

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.caps import caps
from mindie_mm.media.container import check_codec, coded_pixels, open_container
from mindie_mm.media.image import Data, Pixels

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
                packets = (packet for packet in container.demux(stream) if packet.size)
                num_frames = sum(1 for _ in islice(packets, max_frames + 1))
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError, OSError):
            raise MediaError(f"the {len(data)} bytes are no readable video ({', '.join(CONTAINERS)})") from None
        if num_frames > max_frames:
            raise LimitExceeded(f"the video has {max(stated, num_frames)} frames; the limit is {max_frames}")
        if num_frames < stated:
            raise MediaError(f"the video is truncated: it states {stated} frames and holds {num_frames}")
        if not (height and width):  # unknown; FFmpeg does not look into frames that are above the limit
            raise LimitExceeded(f"the video's frames have no size, or more than the limit of {max_pixels} pixels")
        if not num_frames:
            raise MediaError("the video has no frames")
        fps = float(rate) if rate else None
        if fps and num_frames / fps > max_s:
            raise LimitExceeded(f"the video lasts {num_frames / fps:.1f} s; the limit is {max_s:g} s")
        # Where the container counts its frames, its count is the one that samplers go by.
        return cls(height, width, stated or num_frames, fps, data, max_pixels)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Frames uint8 [height, width, 3], RGB, one per index; `indices` ascend.

        MediaError if the video breaks off before the last of them, or changes its size.
        """
        taken = 0
        try:
            with open_container(self.data, CONTAINERS, self.max_pixels) as container:
                stream = container.streams.video[0]
                stream.codec_context.options = {"max_pixels": str(coded_pixels(self.max_pixels))}
                stream.thread_type = "AUTO"
                stream.codec_context.thread_count = torch.get_num_threads()
                for index, frame in enumerate(container.decode(stream)):
                    while taken < len(indices) and index == indices[taken]:
                        if (frame.height, frame.width) != (self.height, self.width):
                            raise MediaError(
                                f"frame {index} of the video is {frame.width}x{frame.height}, "
                                f"the video {self.width}x{self.height}"
                            )
                        yield np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
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


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise LimitExceeded(f"the video has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")
