"""Opening of audio and video containers in memory. Only the formats and codecs in this module are allowed."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.stream import VideoStream

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.matroska import without_compression
from mindie_mm.media.guard.metadata import check_metadata
from mindie_mm.media.guard.sample_tables import check_tables
from mindie_mm.media.guard.transport import whole_packets
from mindie_mm.media.guard.wave_format import as_little_endian, with_container_bits

_Stream = TypeVar("_Stream", VideoStream, AudioStream)

MAX_STREAMS = 64
"""Maximum number of streams of a container."""
OPEN_S = 0.5
"""Maximum CPU time in seconds for finding the tracks of a container, if more than `OPEN_BYTES` have been read.

The time includes the checks in this package.
"""
OPEN_BYTES = 3 * 2**21
"""Number of bytes that may be read before `OPEN_S` replaces `DECODE_S` as the limit.

FFmpeg decodes at most 5 MB of frames to find the tracks.
"""
DECODE_S = 3.0
"""Maximum CPU time in seconds for finding the tracks of any container. One second of 7680x4320 video takes 1 s."""
WHOLE_BYTES = 2**24 + OPEN_BYTES
"""Maximum number of bytes that FFmpeg may read as whole objects before it has found the tracks.

Such objects are pictures, texts, attached files, tables and first frames.
"""
MAX_READ = 4
"""Maximum total size of a stream's packets, as a multiple of the container's size. In an MP4, samples may share bytes.
"""
SPARE_BYTES = 2**24
"""Number of bytes that a stream's packets may have in addition to `MAX_READ` times the container's size."""
BARE = ("mp3", "aac")
"""Formats without a container. The decoder itself finds their frames.

There may be tags and zeros between and after the frames.
"""
_TRANSPORT_STREAM = "mpegts"
_PROBE_PACKETS = 100
"""Maximum number of packets that FFmpeg probes to identify a stream whose codec the container does not state.

FFmpeg repeats all its probes for each packet. For 64 streams, this can take 3 s.
"""
_BUFFER_BYTES = 2**15
"""Size in bytes of FFmpeg's read buffer. For larger reads, FFmpeg does not use the buffer."""
_PIECE_BYTES = 2**20
"""Maximum number of bytes that one read returns. Each read makes a copy."""
_VIDEO_CODECS = (
    "h264,hevc,libdav1d,av1,vp8,vp9,mpeg1video,mpeg2video,mpeg4,h263,flv,msmpeg4v1,msmpeg4v2,msmpeg4,wmv1,wmv2,wmv3,vc1,"
    "theora,mjpeg,prores,dnxhd,ffv1,huffyuv,rawvideo,gif,dvvideo,qtrle,cinepak"
)
_AUDIO_CODECS = (
    "aac,aac_latm,ac3,eac3,alac,amrnb,amrwb,flac,mp2,mp2float,mp3,mp3float,opus,vorbis,wmav1,wmav2,wmapro,gsm_ms,"
    "adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_s16be,"
    "pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s8,pcm_u8,pcm_bluray,pcm_dvd"
)
CODECS = frozenset([*_VIDEO_CODECS.split(","), *_AUDIO_CODECS.split(",")])
"""FFmpeg's names of the decoders that may run.

FFmpeg has hundreds of other decoders, for example for the formats of games and cameras. Few of them have been fuzzed.
"""


class _Source(io.BytesIO):
    """The bytes of a container, which FFmpeg reads in pieces. Reads are limited while the container is being opened.

    FFmpeg does not limit the number of boxes, chunks, tags or cues. It can take 6 s to read 40 MiB of these. FFmpeg
    also does not limit the size of objects that it keeps as a whole. Reads of such objects can be recognized, because
    FFmpeg requests the size of the object instead of the size of its buffer.
    """

    def __init__(self, data: bytes, began: float) -> None:
        """Wrap `data`. `began` is the value of `time.thread_time()` before the container was opened."""
        super().__init__(data)
        self._num_bytes = len(data)
        self._began = began
        self._num_read = self._num_whole = 0
        self._is_open = False
        self._refusal = ""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `_PIECE_BYTES` bytes, or no bytes if a limit has been exceeded.

        `opened` later raises the error. This method does not, because PyAV prints an error that is raised repeatedly.
        """
        size = self._num_bytes if size is None or size < 0 else size
        if not self._is_open:
            self._refusal = self._refusal or self._refuses(size)
        piece = b"" if self._refusal else super().read(min(size, _PIECE_BYTES))
        self._num_read += len(piece)
        self._num_whole += len(piece) if size > _BUFFER_BYTES else 0
        return piece

    def opened(self) -> None:
        """Stop limiting reads, because the search for tracks is over. Raise LimitExceeded if a limit was exceeded."""
        if self._refusal:
            raise LimitExceeded(f"opening the container takes more than the limit of {self._refusal}")
        self._is_open = True

    def _refuses(self, size: int) -> str:
        """Return the limit that reading `size` more bytes would exceed, or an empty string."""
        limit_s = OPEN_S if self._num_read > OPEN_BYTES else DECODE_S
        if time.thread_time() - self._began > limit_s:
            return f"{limit_s:g} s"
        whole = min(size, self._num_bytes - self.tell()) if size > _BUFFER_BYTES else 0
        return f"{WHOLE_BYTES} bytes read at once" if self._num_whole + whole > WHOLE_BYTES else ""


@contextmanager
def reading(failure: Callable[[], MediaError]) -> Iterator[None]:
    """Raise `failure()` instead of PyAV's errors about a broken container. A MemoryError is raised unchanged."""
    try:
        yield
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, OSError):
        raise failure() from None


def open_container(data: bytes, formats: Sequence[str], max_pixels: int) -> InputContainer:
    """Open a container whose format is detected by content. The caller must close it.

    Args:
        data: The container.
        formats: FFmpeg's names of the allowed formats.
        max_pixels: Maximum number of pixels of a frame, without padding to whole blocks. FFmpeg does not decode larger
            frames, not even to identify a stream.

    Raises:
        LimitExceeded: The container exceeds a limit.
        MediaError: The container has a feature that is not supported.
        av.FFmpegError: The data are not a container in one of `formats`. `reading` replaces this error.

    """
    began = time.thread_time()
    check_metadata(data)
    check_tables(data)
    others = [name for name in formats if name != _TRANSPORT_STREAM]
    try:
        return _open(with_container_bits(as_little_endian(without_compression(data))), others, max_pixels, began)
    except av.ArgumentError:  # none of these formats matches
        if _TRANSPORT_STREAM not in formats:
            raise
    return _open(whole_packets(data), [_TRANSPORT_STREAM], max_pixels, began)


def _open(data: bytes, formats: Sequence[str], max_pixels: int, began: float) -> InputContainer:
    options = {
        "format_whitelist": ",".join(formats),
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(sorted(CODECS)),
        "max_streams": str(MAX_STREAMS),
        "max_probe_packets": str(_PROBE_PACKETS),
        "max_pixels": str(coded_pixels(max_pixels)),
    }
    source = _Source(data, began)
    try:
        with _adding_streams():
            container: InputContainer = av.open(source, options=options, buffer_size=_BUFFER_BYTES)
    finally:
        source.opened()
    return container


@contextmanager
def _adding_streams() -> Iterator[None]:
    """Raise LimitExceeded instead of PyAV's MemoryError. FFmpeg reports too many streams as a lack of memory."""
    try:
        yield
    except av.MemoryError:
        raise LimitExceeded(
            f"the container has more streams than the limit of {MAX_STREAMS}, or needs more memory than is available"
        ) from None


def best_stream(container: InputContainer, kind: Literal["video", "audio"]) -> Any:
    """Return the stream of `kind` that players choose, and not, for example, a preview or a commentary.

    Streams without an allowed decoder are passed over, as av_find_best_stream does if its caller needs a decoder. Cover
    art is no video stream. If no stream can be decoded, the result is a stream that `check_codec` refuses.

    Raises:
        MediaError: The container has no stream of this kind.

    """
    streams = [one for one in container.streams if one.type == kind and not one.disposition & Disposition.attached_pic]
    usable = {one.index for one in streams if _is_allowed(one.codec_context)}
    for one in container.streams:
        if usable and one.type == kind and one.index not in usable:
            one.disposition = Disposition.hearing_impaired  # FFmpeg's lowest rank
    stream = container.streams.best(kind)
    if stream is None or not streams:
        raise MediaError(f"the file has no {kind} stream" + (", only cover art" if stream is not None else ""))
    return stream if not usable or stream.index in usable else container.streams[min(usable)]


def packets_of(container: InputContainer, stream: _Stream, num_bytes: int) -> Iterator[av.Packet[_Stream]]:
    """Yield the packets of `stream` in decoding order, except empty packets. Skip the packets of other streams.

    Raises:
        LimitExceeded: The packets have more than `MAX_READ` * `num_bytes` + `SPARE_BYTES` bytes in total. `num_bytes`
            is the size of the container.
        RequestAborted: The request was aborted.

    """
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    read, limit = 0, MAX_READ * num_bytes + SPARE_BYTES
    with _adding_streams(), suppress(IndexError):  # PyAV raises IndexError at the end if streams appeared late
        for packet in container.demux(stream):
            cancellation.check()
            read += packet.size
            if read > limit:
                raise LimitExceeded(
                    f"the container has {num_bytes} bytes, but its packets have more bytes in total than the "
                    f"limit of {limit}"
                )
            if packet.size:
                yield packet


def frames_of(
    container: InputContainer, stream: _Stream, num_bytes: int, tolerant: Sequence[str] = BARE
) -> Iterator[Any]:
    """Decode `stream` and yield its frames, including frames that the decoder buffers until the end.

    In a container in one of the `tolerant` formats, packets that cannot be decoded are skipped. A stream without a
    container (`BARE`) may have any data between its frames.

    Raises:
        LimitExceeded: In the same cases as `packets_of`.

    """
    passed_over = (av.InvalidDataError,) if container.format.name in tolerant else ()
    for packet in packets_of(container, stream, num_bytes):
        with suppress(*passed_over):
            yield from packet.decode()
    yield from stream.decode(None)


def coded_pixels(max_pixels: int) -> int:
    """Return the value of FFmpeg's limit that allows frames of at most `max_pixels`.

    FFmpeg counts coded pixels: it rounds width and height up to multiples of 16 or 32.
    """
    return max_pixels + 64 * math.isqrt(max_pixels) + 32 * 32


def check_codec(context: av.CodecContext | None, what: str) -> None:
    """Raise MediaError unless the decoder of a stream is in `CODECS`. `what` is the name of the stream in the error."""
    if context is None:
        raise MediaError(f"{what} has an unknown codec")
    if not _is_allowed(context):
        raise MediaError(f"{what} has a codec that is not supported")


def _is_allowed(context: av.CodecContext | None) -> bool:
    return context is not None and context.name in CODECS
