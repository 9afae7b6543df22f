"""Decoding of videos with PyAV. Only sampled frames are converted to RGB. If possible, other frames are not decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.errors import InputError, LimitExceeded, MediaError, Miscounted, naming
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.caps import VideoSample, Work, decodes_to_count, length_text, work
from mindie_mm.media.guard.container import (
    best_stream,
    check_codec,
    coded_pixels,
    open_container,
    packets_of,
    reading,
)
from mindie_mm.media.guard.sample_tables import may_be_turned
from mindie_mm.media.image.encoded_image import Data, Frames, Pixels, open_image
from mindie_mm.media.video import seek
from mindie_mm.media.video.alpha_track import has_alpha_track
from mindie_mm.media.video.animation import Animation, is_animation, is_still
from mindie_mm.media.video.display_matrix import Orientation
from mindie_mm.media.video.rgb import UNSURE_ALPHA, FrameConverter, is_alpha_empty
from mindie_mm.media.video.seek import Keyframes
from mindie_mm.media.video.timeline import (
    AVI,
    PLACEHOLDER,
    Packets,
    decoded_times,
    frames_of_video,
    has_exact_times,
    longest_tail,
    rate_of,
)
from mindie_mm.settings.config import Colour, MediaCaps

CONTAINERS = ("mov", "matroska", "avi", "asf", "mpegts", "flv", "mpeg", "gif", "dv", "ogg", "ivf", "h264", "hevc")
"""Supported containers, detected by content.

`mov` includes MP4, `matroska` includes WebM, and `mpeg` is the MPEG program stream. `h264` and `hevc` are streams
without a container, as cameras write them, which FFmpeg assumes to have 25 frames per second. Playlists are not
supported, because with a playlist, the client could choose files and URLs for FFmpeg to open.
"""
_FEW_FRAMES = 64
"""Number of further frames that may always be decoded to check that a video is complete, even if few are sampled."""


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video whose container has been read and checked against the limits. The frames are not decoded yet."""

    height: int
    """Height in pixels of an upright frame."""
    width: int
    """Width in pixels of an upright frame."""
    num_frames: int
    """Number of frames that FFmpeg decodes from the file."""
    fps: float | None
    """Average number of frames per second. None if neither the container nor the frame times determine the rate."""
    orientation: Orientation
    """Rotation and mirroring that make a frame upright."""
    data: bytes
    max_pixels: int
    """Maximum number of pixels of a decoded frame. The container may state a smaller size."""
    keyframes: Keyframes | None
    """Keyframes at which decoding can start. None if decoding must start at the beginning of the file."""
    is_counted: bool
    """True if `num_frames` is the number of packets instead of the number of decoded frames."""
    work: Work
    """Decoding work of the request that the video belongs to."""
    codec: str
    """FFmpeg's name of the decoder."""
    has_alpha_track: bool
    """True if the transparency of the frames is a second video, which is decoded, too."""

    @classmethod
    def open(cls, data: bytes) -> EncodedVideo:
        """Read the container of `data`.

        If frames may be rotated or mirrored, this method decodes one frame. If packets cannot be counted as frames, it
        decodes all frames.

        Raises:
            MediaError: The data are not a readable video, or are damaged.
            LimitExceeded: The video exceeds a limit.

        """
        of_request = work()
        limits = of_request.caps
        max_pixels, max_frames = limits.max_video_pixels, limits.max_video_frames
        with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
            stream = best_stream(container, "video")
            check_codec(stream.codec_context, "the video")
            height, width, stated, name = stream.height, stream.width, stream.frames, container.format.name
            codec, alpha_track = stream.codec_context.name, has_alpha_track(stream)
            _check_size(height, width, max_pixels)
            packets = Packets.read(
                packets_of(container, stream, len(data)), stream.codec_context, max_frames, max_pixels
            )
            if packets.number > max_frames:
                _check_length(max(packets.number, stated if stated < PLACEHOLDER else 0), None, limits)
            num_missing = _num_missing(stream, name, packets.number, data)
            if num_missing > longest_tail(packets.number + num_missing):
                raise MediaError(
                    f"the video is truncated: its header declares {stated} frames, but it has {packets.number}"
                )
            if not (height and width):  # FFmpeg does not parse frames that are above the limit
                raise LimitExceeded(
                    f"the size of the video's frames is unknown, or above the limit of {max_pixels} pixels"
                )
            num_frames, times = packets.num_shown, packets.times
            is_counted = packets.are_frames and not num_missing and has_exact_times(name, codec)
            is_counted = is_counted and not decodes_to_count()
            if num_frames and not is_counted:
                of_request.add_video(packets.number * height * width)
                num_frames, times = _decoded(data, max_pixels, packets.number)
                if not num_frames:
                    raise MediaError(f"the video is broken: none of its {packets.number} packets can be decoded")
            if not num_frames:
                raise MediaError("the video has no frames")
            rate = rate_of(stream, name, packets, times, num_frames)
        fps = float(rate) if rate else None
        _check_length(num_frames, fps, limits)
        orientation = _orientation(data, max_pixels)
        if orientation.transposed:
            height, width = width, height
        keyframes = None
        if times is not None and name in seek.CONTAINERS and not alpha_track:
            keyframes = Keyframes.of(times, packets.key_times)
        return cls(
            height=height,
            width=width,
            num_frames=num_frames,
            fps=fps,
            orientation=orientation,
            data=data,
            max_pixels=max_pixels,
            keyframes=keyframes,
            is_counted=is_counted,
            work=of_request,
            codec=codec,
            has_alpha_track=alpha_track,
        )

    def count(self, indices: Sequence[int]) -> None:
        """Count the pixels that `decode` will decode for `indices`, without decoding them, and note the sample.

        Raises:
            LimitExceeded: The request would decode too many pixels.

        """
        num_bytes = 3 * self.height * self.width * len(indices)
        self.work.sample = VideoSample(self.num_frames, self.fps, tuple(indices), num_bytes)
        self.work.add_video(self._num_decoded(indices) * self._frame_pixels)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield the frame for each of the ascending `indices` as RGB pixels, uint8 [height, width, 3].

        A frame of another size is scaled to the size of the video. If the container supports seeking, frames that are
        far from the sampled frames are not decoded. Frames after the last of `indices` may be decoded to verify the
        number of frames.

        Raises:
            MediaError: The video ends before the last of `indices`.
            LimitExceeded: A frame has too many pixels.
            Miscounted: The video has more or fewer frames than its packets indicated.

        """
        taken = 0

        def broken() -> MediaError:
            kind = Miscounted if self.is_counted else MediaError
            decoded = min(taken, len(indices))
            return kind(f"the video is broken: only {decoded} of {len(indices)} sampled frames could be decoded")

        with reading(broken):
            converter = FrameConverter(self._background(), hdr_to_sdr=self.work.caps.hdr_to_sdr)
            wanted = self._up_to_end(indices)
            for frame in self._frames_at(wanted):
                if taken < len(indices):
                    yield self._upright(frame, converter)
                taken += 1
        if taken < len(wanted):
            raise broken()

    def _frames_at(self, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the frames at `indices`. Stop before the first frame that is missing.

        PyAV errors are propagated unchanged.

        Raises:
            Miscounted: The video has more frames than its packets indicated.

        """
        taken = 0
        for frame in self._sought(indices):
            yield frame
            taken += 1
        if taken == len(indices):
            return
        if self.keyframes is not None and self.keyframes.spare(indices):  # `count` has assumed that seeking works
            self.work.add_video((indices[-1] + 1) * self._frame_pixels)
        with open_container(self.data, CONTAINERS, self.max_pixels) as container:
            stream = _stream_to_decode(container, self.max_pixels)
            for index, frame in enumerate(frames_of_video(container, stream, len(self.data))):
                if index == self.num_frames:
                    raise Miscounted(f"the video has more than the {index} frames that its packets indicate")
                while taken < len(indices) and index == indices[taken]:
                    yield frame
                    taken += 1
                is_last = self.is_counted and index + 1 == self.num_frames
                if taken == len(indices) and not is_last:
                    return

    @property
    def _frame_pixels(self) -> int:
        """Number of pixels to decode for a frame."""
        return self.height * self.width * (2 if self.has_alpha_track else 1)

    def _num_decoded(self, indices: Sequence[int]) -> int:
        return indices[-1] + 1 if self.keyframes is None else self.keyframes.num_decoded(indices)

    def _up_to_end(self, indices: Sequence[int]) -> Sequence[int]:
        """Return `indices`, followed by the index of the last frame if decoding up to this frame is cheap enough."""
        wanted = [*indices, self.num_frames - 1]
        before = self._num_decoded(indices)
        further = self._num_decoded(wanted) - before
        num_pixels = further * self._frame_pixels
        left = self.work.caps.max_request_video_pixels - self.work.video_pixels
        if not self.is_counted or further > max(before, _FEW_FRAMES) or num_pixels > left:
            return indices
        self.work.add_video(num_pixels)
        return wanted

    def _sought(self, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the frames at `indices` by seeking. Stop before the first frame that seeking does not find.

        If seeking would not save anything, yield no frames.
        """
        if self.keyframes is None or not self.keyframes.spare(indices):
            return
        with (
            suppress(av.FFmpegError, ValueError, OSError),
            open_container(self.data, CONTAINERS, self.max_pixels) as container,
        ):
            stream = _stream_to_decode(container, self.max_pixels)
            yield from seek.sought(container, stream, self.keyframes, indices, len(self.data))

    def _background(self) -> Colour | None:
        """Return the color behind transparent pixels, or None if the alpha channel is unused in the whole video."""
        if self.codec in UNSURE_ALPHA:
            with open_container(self.data, CONTAINERS, self.max_pixels) as container:
                if is_alpha_empty(self._counted(container)):
                    return None
        return self.work.caps.rgba_background_color

    def _counted(self, container: InputContainer) -> Iterator[av.VideoFrame]:
        """Decode all frames. Count only the pixels of the frames that the caller passes."""
        for frame in frames_of_video(container, _stream_to_decode(container, self.max_pixels), len(self.data)):
            yield frame
            self.work.add_video(self._frame_pixels)

    def _upright(self, frame: av.VideoFrame, converter: FrameConverter) -> Pixels:
        _check_size(frame.height, frame.width, self.max_pixels)
        height, width = (self.width, self.height) if self.orientation.transposed else (self.height, self.width)
        return self.orientation.apply(converter.rgb(frame, width, height))


@dataclass(frozen=True, slots=True, eq=False)
class SampledVideo:
    """Frames that the caller has already sampled, with the same interface as an EncodedVideo."""

    height: int
    """Height in pixels of each frame."""
    width: int
    """Width in pixels of each frame."""
    fps: float | None
    """Rate in frames per second at which the caller sampled the frames. None if the rate is unknown."""
    frames: Frames | Pixels

    @classmethod
    def open(cls, frames: Frames | Pixels, fps: float | None) -> SampledVideo:
        """Read the headers of the encoded frames.

        Raises:
            InputError: The frames have different sizes.
            MediaError: A frame cannot be read.
            LimitExceeded: A frame or the number of frames exceeds a limit.

        """
        limits = work().caps
        sizes: list[tuple[int, int]] = []
        _check_length(len(frames), fps, limits)
        for index, frame in enumerate(frames if isinstance(frames, tuple) else frames[:1]):
            with naming(f"frame {index}"):
                image = open_image(frame)
                sizes.append((image.height, image.width))
                _check_size(*sizes[index], limits.max_video_pixels)
            if sizes[index] != sizes[0]:
                (height, width), (first_height, first_width) = sizes[index], sizes[0]
                raise InputError(
                    f"frame {index} has {width}x{height} pixels, but frame 0 has {first_width}x{first_height}; "
                    "all frames of a video must have the same size"
                )
        return cls(*sizes[0], fps, frames)

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    def count(self, indices: Sequence[int]) -> None:
        """Do nothing. Encoded frames were counted when they were opened, and pixels need no decoding."""

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield RGB pixels, uint8 [height, width, 3], for each index. Raise MediaError if an image is broken."""
        for index in indices:
            cancellation.check()
            with naming(f"frame {index}"):
                pixels = open_image(self.frames[index]).decode()  # open the image again: an index may occur twice
            yield pixels


Video = EncodedVideo | Animation | SampledVideo
"""An encoded video, an animated image, or frames that the caller has sampled."""


def open_video(data: Data, sample_fps: float | None) -> Video:
    """Read the number and size of the frames of a video. Call `decode` on the result to decode frames.

    Args:
        data: An encoded video, or frames that the caller has sampled.
        sample_fps: Rate in frames per second at which the caller sampled the frames. Not allowed for an encoded video.

    Raises:
        InputError: `sample_fps` is given for an encoded video, or frames have different sizes.
        MediaError: The data cannot be read, are damaged, or are a still image.
        LimitExceeded: The video exceeds a limit.

    """
    assert not isinstance(data, DocumentPage), "pages are images"
    if not isinstance(data, bytes):
        return SampledVideo.open(data, sample_fps)
    if sample_fps is not None:
        raise InputError(f"sample_fps is {sample_fps:g}, but an encoded video has its own rate; leave sample_fps out")
    if is_animation(data):
        return Animation.open(data)
    video = None if is_still(data) else EncodedVideo.open(data)
    if video is None or (video.codec == "gif" and video.num_frames == 1):
        raise MediaError(
            f"the {len(data)} bytes are a still image, not a video; send it as an image (in a chat, as a part of type "
            "image_url)"
        )
    return video


def _num_missing(stream: VideoStream, container: str, num_packets: int, data: bytes) -> int:
    """Return the number of packets that are missing because the file is truncated.

    A complete file may have fewer packets than its container states, for three reasons. FFmpeg's index omits packets
    that edit lists hide. AVI has empty chunks that repeat a frame. An AVI that was written to a pipe has placeholders
    in its header.
    """
    if num_packets >= stream.frames:
        return 0
    if container == AVI:
        num_bytes = int.from_bytes(data[4:8], "little") + 8
        is_cut = stream.frames < PLACEHOLDER and len(data) < num_bytes < 2**32
        return stream.frames - num_packets if is_cut else 0
    return max(0, sum(entry.size > 0 for entry in islice(stream.index_entries, stream.frames)) - num_packets)


def _decoded(data: bytes, max_pixels: int, num_packets: int) -> tuple[int, NDArray[np.int64] | None]:
    """Decode all frames and return their number and times. If a time is missing or out of order, the times are None.

    Raises:
        MediaError: The video is broken.

    """
    with reading(lambda: _unreadable(data)), open_container(data, CONTAINERS, max_pixels) as container:
        packet_times = decoded_times(container, _stream_to_decode(container, max_pixels), len(data), num_packets)
    known = [time for time in packet_times if time is not None]
    times = np.array(known, np.int64)
    return len(packet_times), times if len(known) == len(packet_times) and (np.diff(times) > 0).all() else None


def _orientation(data: bytes, max_pixels: int) -> Orientation:
    """Return the orientation of the frames of `data`. Raise MediaError if the video cannot be read."""
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
    # FFmpeg's HEVC threads wait for each other's frames. For a damaged file, they may wait forever.
    stream.codec_context.thread_count = 1 if stream.codec_context.name == "hevc" else torch.get_num_threads()
    return stream


def _unreadable(data: bytes) -> MediaError:
    return MediaError(
        f"the {len(data)} bytes cannot be read as a video (supported formats: {', '.join(CONTAINERS)}, animated "
        "PNG and WebP)"
    )


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise LimitExceeded(f"the video has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")


def _check_length(num_frames: int, fps: float | None, limits: MediaCaps) -> None:
    if num_frames > limits.max_video_frames:
        raise LimitExceeded(f"the video has {num_frames} frames; the limit is {limits.max_video_frames}")
    if fps and num_frames / fps > limits.max_video_seconds:
        length = length_text(num_frames / fps, limits.max_video_seconds)
        raise LimitExceeded(f"the video lasts {length}; the limit is {limits.max_video_seconds:g} s")
