"""Length of an audio clip according to its header, which reveals that a file is truncated.

FFmpeg decodes the samples that are left of a truncated file without an error, and reduces the length of a WAV file to
the samples that it has.
"""

from __future__ import annotations

import re

import av
from av.audio.stream import AudioStream
from av.container import InputContainer

_EXACT = frozenset({"wav", "w64", "aiff", "au", "nistsphere", "caf", "mov,mp4,m4a,3gp,3g2,mj2"})
"""FFmpeg's names of the containers that state the length of each track."""
_MATROSKA, _WAV, _MP3 = "matroska,webm", "wav", "mp3"
_MP3_LENGTH = re.compile(rb"\xff[\xe2-\xff].{2,40}?(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
"""Beginning of the first frame of an MP3, with the number of frames. FFmpeg may estimate the length nevertheless."""
_MP3_HEAD = 2**21
"""Number of bytes at the beginning of an MP3, with its tags, in which its first frame is searched."""
_PLACEHOLDER = 0x7FFF0000
"""Sizes from this one on are placeholders of writers that did not know the size, as is 0."""
_MAX_CHUNKS = 2**12
"""Maximum number of chunks of a WAV file to read before its samples."""
_LONGEST_TAIL = 0.1
"""Maximum fraction of a clip that may be missing at its end, as of a video."""
_LEAST_TAIL_S = 0.2
"""Length in seconds that may be missing at the end of any clip. Encoders and edit lists cut this much."""


def declared_length_s(container: InputContainer, stream: AudioStream, data: bytes) -> float:
    """Return the length in seconds that a complete file has, or 0 if its header does not state it exactly."""
    name, stated = container.format.name, 0.0
    if data.startswith(b"RIFF") and name == _WAV:
        return _of_truncated_wav(data)
    if name == _MP3:
        found = _MP3_LENGTH.search(data, 0, _MP3_HEAD)
        samples = 1152 if stream.rate >= 32_000 else 576  # the versions of MPEG differ in rates and in frames
        return int.from_bytes(found[1]) * samples / stream.rate if found else 0.0
    if name in _EXACT:
        stated = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    elif name == _MATROSKA and len(container.streams) == 1:  # otherwise, another track may be longer
        stated = (container.duration or 0) / av.time_base
    return stated


def is_truncated(length_s: float, declared_s: float) -> bool:
    """Return whether a clip of `length_s` lacks more of the declared length than may be missing."""
    return declared_s - length_s > max(_LEAST_TAIL_S, _LONGEST_TAIL * declared_s)


def _of_truncated_wav(data: bytes) -> float:
    """Return the declared length of a WAV file that has fewer samples than it declares, or 0 for other files."""
    place, bytes_per_s = 12, 0
    for _ in range(_MAX_CHUNKS):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        if name == b"fmt ":
            bytes_per_s = int.from_bytes(data[place + 16 : place + 20], "little")
        elif name == b"data":
            is_cut = len(data) - place - 8 < size < _PLACEHOLDER
            return size / bytes_per_s if is_cut and bytes_per_s else 0.0
        place += 8 + size + size % 2
    return 0.0
