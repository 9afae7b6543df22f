"""Opening containers of video and sound: from memory alone, and of the formats and codecs listed here alone."""

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
from av.stream import Discard
from av.video.stream import VideoStream

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.matroska import without_compression
from mindie_mm.media.guard.metadata import check_metadata
from mindie_mm.media.guard.sample_tables import check_tables
from mindie_mm.media.guard.transport import whole_packets

_Stream = TypeVar("_Stream", VideoStream, AudioStream)

MAX_STREAMS = 64
"""Most streams of a container."""
OPEN_S = 0.5
"""Most processor time until a container's tracks are known, our own checks included, in seconds, if that takes more
than `OPEN_BYTES`."""
OPEN_BYTES = 3 * 2**21
"""Bytes that may be read meanwhile in `DECODE_S`; FFmpeg decodes frames of 5 MB at most to know its tracks."""
DECODE_S = 3.0
"""Most processor time until then of any container, in seconds: a second's frames of 7680x4320 take one."""
WHOLE_BYTES = 2**24 + OPEN_BYTES
"""Most bytes of what FFmpeg reads whole until then: pictures, texts, attached files, tables, first frames."""
MAX_READ = 4
"""Most bytes of a stream's packets, as a multiple of the container's: samples of an MP4 may be the same bytes."""
SPARE_BYTES = 2**24
"""Bytes that packets may have beyond that."""
BARE = ("mp3", "aac")
"""Formats of frames one after another that decoders find by themselves: tags and zeroes lie between and behind them."""
_TRANSPORT_STREAM = "mpegts"
_PROBE_PACKETS = 100
"""Most packets that are looked at to find out what a stream is of which the container does not say it: each by all that
FFmpeg knows, anew, which took 64 streams 3 seconds."""
_BUFFER_BYTES = 2**15
"""Of FFmpeg's buffer. What is larger it reads past it."""
_PIECE_BYTES = 2**20
"""Most bytes that are handed over at a time: they are a copy."""
_VIDEO_CODECS = (
    "h264,hevc,libdav1d,av1,vp8,vp9,mpeg1video,mpeg2video,mpeg4,h263,flv,msmpeg4v1,msmpeg4v2,msmpeg4,wmv1,wmv2,wmv3,vc1,"
    "theora,mjpeg,prores,dnxhd,ffv1,huffyuv,rawvideo,gif,dvvideo,qtrle,cinepak"
)
_SOUND_CODECS = (
    "aac,aac_latm,ac3,eac3,alac,amrnb,amrwb,flac,mp2,mp2float,mp3,mp3float,opus,vorbis,wmav1,wmav2,wmapro,gsm_ms,"
    "adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_s16be,"
    "pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s8,pcm_u8,pcm_bluray,pcm_dvd"
)
CODECS = frozenset([*_VIDEO_CODECS.split(","), *_SOUND_CODECS.split(",")])
"""Decoders that are run, by FFmpeg's names. It has some hundreds more, of games and cameras: few are ever fuzzed."""


class _Source(io.BytesIO):
    """A container's bytes, which FFmpeg reads a piece at a time.

    FFmpeg bounds neither boxes nor chunks, tags or cues: 40 MiB of them took it up to 6 seconds. Nor does it bound what
    it keeps whole, which it asks for by its size, and not by that of its buffer.
    """

    def __init__(self, data: bytes, began: float) -> None:
        """`began` on this thread's clock."""
        super().__init__(data)
        self._num_bytes = len(data)
        self._began = began
        self._num_read = self._num_whole = 0
        self._is_open = False
        self._refusal = ""

    def read(self, size: int | None = -1, /) -> bytes:
        """Nothing more once a limit is passed, as at the end: PyAV prints what is raised here more than once."""
        size = self._num_bytes if size is None or size < 0 else size
        if not self._is_open:
            self._refusal = self._refusal or self._refuses(size)
        piece = b"" if self._refusal else super().read(min(size, _PIECE_BYTES))
        self._num_read += len(piece)
        self._num_whole += len(piece) if size > _BUFFER_BYTES else 0
        return piece

    def opened(self) -> None:
        """Says that the tracks are known, or none are. LimitExceeded if that took too much."""
        if self._refusal:
            raise LimitExceeded(f"to find out what the container holds takes more than {self._refusal}, the limit")
        self._is_open = True

    def _refuses(self, size: int) -> str:
        """The limit that is passed where FFmpeg asks for `size` bytes more, if one is."""
        limit_s = OPEN_S if self._num_read > OPEN_BYTES else DECODE_S
        if time.thread_time() - self._began > limit_s:
            return f"{limit_s:g} s"
        whole = min(size, self._num_bytes - self.tell()) if size > _BUFFER_BYTES else 0
        return f"{WHOLE_BYTES} bytes at once" if self._num_whole + whole > WHOLE_BYTES else ""


@contextmanager
def reading(failure: Callable[[], MediaError]) -> Iterator[None]:
    """Raises `failure()` for what PyAV raises of a broken container; to be out of memory says nothing of one."""
    try:
        yield
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, OSError):
        raise failure() from None


def open_container(data: bytes, formats: Sequence[str], max_pixels: int) -> InputContainer:
    """A container of one of `formats`, told by content. Closing it is the caller's.

    Raises what PyAV raises for what is none; LimitExceeded, MediaError. Frames of more than `max_pixels`, and of what
    whole blocks add to them, are not even decoded to find out what they are.
    """
    began = time.thread_time()
    check_metadata(data)
    check_tables(data)
    others = [name for name in formats if name != _TRANSPORT_STREAM]
    try:
        return _open(without_compression(data), others, max_pixels, began)
    except av.ArgumentError:  # it is of none of these
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
    """LimitExceeded where FFmpeg has no room for one: of those beyond `max_streams` it says no more."""
    try:
        yield
    except av.MemoryError:
        raise LimitExceeded(
            f"the container has more than {MAX_STREAMS} streams, the limit, or takes more memory than there is"
        ) from None


def best_stream(container: InputContainer, kind: Literal["video", "audio"]) -> Any:
    """The stream of `kind` that players take, not a preview or a commentary beside it. MediaError for none."""
    stream = container.streams.best(kind)
    if stream is None:
        raise MediaError(f"the file has no {kind} stream")
    return stream


def packets_of(container: InputContainer, stream: _Stream, num_bytes: int) -> Iterator[av.Packet[_Stream]]:
    """Packets of `stream`, in the order of decoding, without the empty ones; other streams are passed over unread.

    LimitExceeded where they are much more than the `num_bytes` of the container, RequestAborted.
    """
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all
    read, limit = 0, MAX_READ * num_bytes + SPARE_BYTES
    with _adding_streams(), suppress(IndexError):  # PyAV's, at the end, where some were first met on the way
        for packet in container.demux(stream):
            cancellation.check()
            read += packet.size
            if read > limit:
                raise LimitExceeded(f"the container's {num_bytes} bytes make packets of more than {limit}, the limit")
            if packet.size:
                yield packet


def frames_of(
    container: InputContainer, stream: _Stream, num_bytes: int, tolerant: Sequence[str] = BARE
) -> Iterator[Any]:
    """Decode `stream` and yield its frames, including those that the decoder buffers until the end.

    Packets that do not decode are skipped in containers of the `tolerant` formats. A stream without a container
    (`BARE`) may have any data between its frames.

    Raises:
        LimitExceeded: As in `packets_of`.

    """
    passed_over = (av.InvalidDataError,) if container.format.name in tolerant else ()
    for packet in packets_of(container, stream, num_bytes):
        with suppress(*passed_over):
            yield from packet.decode()
    yield from stream.decode(None)


def coded_pixels(max_pixels: int) -> int:
    """FFmpeg's limit for frames of `max_pixels`: it counts what is coded, sides rounded up to blocks of 16 or 32."""
    return max_pixels + 64 * math.isqrt(max_pixels) + 32 * 32


def check_codec(context: av.CodecContext | None, what: str) -> None:
    """MediaError unless the decoder of `what`, a stream, is one that is run."""
    if context is None:
        raise MediaError(f"{what} is of a codec that is not known")
    if context.name not in CODECS:
        raise MediaError(f"{what} is of a codec that is not decoded here")
