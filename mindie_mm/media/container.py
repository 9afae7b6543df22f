"""Opening containers of video and sound: from memory alone, and of the formats and codecs listed here alone."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import av
from av.container import InputContainer

from mindie_mm.errors import LimitExceeded, MediaError

MAX_STREAMS = 64
"""Most streams of a container."""
_VIDEO_CODECS = (
    "h264,hevc,libdav1d,av1,vp8,vp9,mpeg1video,mpeg2video,mpeg4,h263,flv,msmpeg4v1,msmpeg4v2,msmpeg4,wmv1,wmv2,wmv3,vc1,"
    "theora,mjpeg,prores,dnxhd,ffv1,huffyuv,rawvideo"
)
_SOUND_CODECS = (
    "aac,aac_latm,ac3,eac3,alac,amrnb,amrwb,flac,mp2,mp2float,mp3,mp3float,opus,vorbis,wmav1,wmav2,wmapro,gsm_ms,"
    "adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_s16be,"
    "pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s64be,pcm_s64le,pcm_s8,pcm_u8"
)
CODECS = frozenset([*_VIDEO_CODECS.split(","), *_SOUND_CODECS.split(",")])
"""Decoders that are run, by FFmpeg's names. It has some hundreds more, of games and cameras: few are ever fuzzed."""

_NESTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_PER_SAMPLE = 0x100 | 0x200 | 0x400 | 0x800  # flags of a trun that has a table: duration, size, flags, composition time


def open_container(data: bytes, formats: Sequence[str], max_pixels: int) -> InputContainer:
    """A container of one of `formats`, told by content. Closing it is the caller's.

    Raises what PyAV raises for what is none; LimitExceeded, MediaError. Frames of more than `max_pixels` are not even
    decoded to find out what they are.
    """
    _check_tables(data)
    options = {
        "format_whitelist": ",".join(formats),
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(CODECS),
        "max_streams": str(MAX_STREAMS),
        "max_pixels": str(max_pixels),
    }
    container: InputContainer = av.open(io.BytesIO(data), options=options)
    return container


def check_codec(context: av.CodecContext | None, what: str) -> None:
    """MediaError unless the decoder of `what`, a stream, is one that is run."""
    if context is None:
        raise MediaError(f"{what} is of a codec that is not known")
    if context.name not in CODECS:
        raise MediaError(f"{what} is of a codec that is not decoded here")


def _check_tables(data: bytes) -> None:
    """LimitExceeded for an MP4 that states more samples than it has bytes: FFmpeg makes an index of them all first."""
    if data[4:8] not in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"moof", b"sidx"):
        return
    stated = sum(_stated_samples(kind, data[start : min(stop, start + 16)]) for kind, start, stop in _boxes(data))
    if stated > len(data):
        raise LimitExceeded(f"the container states {stated} samples; its {len(data)} bytes cannot hold them")


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and stop of what each box of an MP4 holds, those inside of others too. Wrong sizes end a level."""
    levels = [(0, len(data))]
    while levels:
        place, end = levels.pop()
        while place + 8 <= end:
            size, kind, head = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8], 8
            if size == 1:
                size, head = int.from_bytes(data[place + 8 : place + 16]), 16
            stop = end if size == 0 else place + size
            if size and size < head:
                break
            if kind in _NESTS:
                levels.append((place + head, min(stop, end)))
            else:
                yield kind, place + head, min(stop, end)
            place = stop


def _stated_samples(kind: bytes, head: bytes) -> int:
    """Samples that a box says there are, each of a byte at least, without a table in which each takes room."""
    if kind == b"stsz" and int.from_bytes(head[4:8]):
        return int.from_bytes(head[4:8]) * int.from_bytes(head[8:12])
    if kind == b"trun" and not int.from_bytes(head[1:4]) & _PER_SAMPLE:
        return int.from_bytes(head[4:8])
    return 0
