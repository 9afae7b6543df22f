"""Length of an audio clip according to its header, which reveals that a file is truncated.

FFmpeg decodes the samples that are left of a truncated file without an error, and reduces the length of many files to
the samples that they have.
"""

from __future__ import annotations

import re
from typing import Literal

import av
from av.audio.stream import AudioStream
from av.container import InputContainer

_EXACT = frozenset({"aiff", "au", "nistsphere", "caf", "flac", "mov,mp4,m4a,3gp,3g2,mj2"})
"""FFmpeg's names of the containers that state the length of each track."""
_OF_ALL_TRACKS = ("matroska,webm", "flv")
"""FFmpeg's names of the containers that state the length of the longest track."""
_WAVS, _MP3, _CAF, _AVI = ("wav", "w64"), "mp3", "caf", "avi"
_MP3_LENGTH = re.compile(rb"\xff[\xe2-\xff].{2,40}?(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
"""Beginning of the first frame of an MP3, with the number of frames. FFmpeg may estimate the length nevertheless."""
_MP3_HEAD = 2**21
"""Number of bytes at the beginning of an MP3, with its tags, in which its first frame is searched."""
_PLACEHOLDER = 0x7FFF0000
"""Sizes from this one on are placeholders of writers that did not know the size, as is 0.

Of sizes with 64 bits, only the upper half is compared.
"""
_MAX_CHUNKS = 2**12
"""Maximum number of chunks of a WAV file to read before its samples."""
_LONGEST_TAIL = 0.1
"""Maximum fraction of a clip that may be missing at its end, as of a video."""
_LEAST_TAIL_S = 0.2
"""Length in seconds that may be missing at the end of any clip. Encoders and edit lists cut this much."""


def declared_length_s(container: InputContainer, stream: AudioStream, data: bytes) -> float:
    """Return the length in seconds that a complete file has, or 0 if its header does not state it exactly."""
    name, stated = container.format.name, 0.0
    if name in _WAVS:
        return _of_truncated_wav(data)
    if name == _MP3:
        found = _MP3_LENGTH.search(data, 0, _MP3_HEAD)
        samples = 1152 if stream.rate >= 32_000 else 576  # the versions of MPEG differ in rates and in frames
        return int.from_bytes(found[1]) * samples / stream.rate if found else 0.0
    if (name == _CAF and stream.codec_context.name.startswith("pcm_")) or (name == _AVI and _is_cut(data)):
        stated = float(stream.frames * stream.time_base) if stream.time_base and stream.frames < _PLACEHOLDER else 0.0
    elif name in _EXACT:
        stated = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    elif name in _OF_ALL_TRACKS and len(container.streams) == 1:  # otherwise, another track may be longer
        stated = (container.duration or 0) / av.time_base
    return stated


def is_truncated(length_s: float, declared_s: float) -> bool:
    """Return whether a clip of `length_s` seconds is so much shorter than declared that its file must be truncated."""
    return declared_s - length_s > max(_LEAST_TAIL_S, _LONGEST_TAIL * declared_s)


def _is_cut(avi: bytes) -> bool:
    """Return whether an AVI is shorter than its header says.

    The number of samples is not compared, because some programs write a wrong number into complete files.
    """
    return len(avi) - 8 < int.from_bytes(avi[4:8], "little") < _PLACEHOLDER


def _of_truncated_wav(data: bytes) -> float:
    """Return the declared length of a WAV file that has fewer samples than it declares, or 0 for other files.

    The names of the chunks of Wave64 are GUIDs, and their sizes have 64 bits and include the chunk's header.
    """
    is_wide = data.startswith(b"riff")
    order: Literal["big", "little"] = "big" if data.startswith(b"RIFX") else "little"
    num_head, num_size, alignment = (24, 8, 8) if is_wide else (8, 4, 2)
    start, bytes_per_s, num_in_rf64 = 64 if is_wide else 20, 0, 0
    for _ in range(_MAX_CHUNKS):
        name = data[start - num_head : start - num_head + 4]
        size = int.from_bytes(data[start - num_size : start], order) - (num_head if is_wide else 0)
        if name == b"fmt ":
            bytes_per_s = int.from_bytes(data[start + 8 : start + 12], order)
        elif name == b"ds64":
            num_in_rf64 = int.from_bytes(data[start + 8 : start + 16], order)
        elif name == b"data":
            unknown = _PLACEHOLDER << 32 if is_wide or num_in_rf64 else _PLACEHOLDER
            is_cut = len(data) - start < (size := num_in_rf64 or size) < unknown
            return size / bytes_per_s if is_cut and bytes_per_s else 0.0
        start += num_head + max(0, size) + -size % alignment
    return 0.0
