"""Correction of the sample format that WAV headers declare, for headers that FFmpeg does not read correctly.

FFmpeg takes the number of valid bits as the size of a sample, and reads the samples of RIFX files as little-endian. It
then decodes noise. Microsoft's WAVEFORMATEXTENSIBLE defines both: samples are left-justified in containers of
`wBitsPerSample` bits, and all numbers of a RIFX file are big-endian.
"""

from __future__ import annotations

import struct

import numpy as np

from mindie_mm.errors import LimitExceeded, MediaError

MAX_FORMATS = 2**10
"""Maximum number of extensible formats in a file, and of chunks of a RIFX file to read before its samples."""

_SUBFORMAT = bytes.fromhex("000000001000800000aa00389b71")
"""End of the GUID of a subformat, after the two bytes of the codec. The GUID ends the format."""
_FIELDS = "HHIIHH"
_FORMAT, _EXTENSION = struct.Struct("<" + _FIELDS), struct.Struct("<HHI")
_EXTENSIBLE = 0xFFFE
_PLAIN = {1: "PCM", 3: "float", 6: "A-law", 7: "mu-law"}
"""Codecs whose samples are single numbers, so that the bytes of each sample can be reversed."""


def with_container_bits(data: bytes) -> bytes:
    """Return `data` with the container's size as the number of valid bits in each WAVEFORMATEXTENSIBLE.

    Return `data` itself if nothing changes. AVI, Wave64 and Matroska files may contain such formats, too. A false block
    size is corrected if the number of bytes per second is right.

    Raises:
        LimitExceeded: The file has more than `MAX_FORMATS` such formats.
        MediaError: The size of a sample is unclear.

    """
    copy, place = None, -1
    for _ in range(MAX_FORMATS):
        if (place := data.find(_SUBFORMAT, place + 1)) < 0:
            return data if copy is None else bytes(copy)
        start = place - 2 - _EXTENSION.size - _FORMAT.size
        if start < 0:
            continue
        codec, channels, rate, bytes_per_s, block, bits = _FORMAT.unpack_from(data, start)
        _, valid, _ = _EXTENSION.unpack_from(data, start + _FORMAT.size)
        is_plain = codec == _EXTENSIBLE and int.from_bytes(data[place - 2 : place], "little") in _PLAIN
        if not is_plain or (valid in (0, bits) and bits % 8 == 0):
            continue
        width = -(-bits // 8)
        right = channels * width
        if not right or (block != right and bytes_per_s != rate * right):
            raise MediaError(
                f"the audio format has blocks of {block} bytes and {bytes_per_s} bytes per second, which contradicts "
                f"{channels} channels of {bits} bits at {rate} Hz"
            )
        copy = copy or bytearray(data)
        _FORMAT.pack_into(copy, start, codec, channels, rate, bytes_per_s, right, 8 * width)
        struct.pack_into("<H", copy, start + _FORMAT.size + 2, 8 * width)
    raise LimitExceeded(f"the file has more audio formats than the limit of {MAX_FORMATS}")


def as_little_endian(data: bytes) -> bytes:
    """Return a RIFX file as a RIFF file. Return other data unchanged.

    Raises:
        MediaError: The samples are not PCM, float, A-law or mu-law, so that their byte order is unknown.

    """
    if data[:4] != b"RIFX" or data[8:12] != b"WAVE":
        return data
    chunks, width, place = [], 0, 12
    for _ in range(MAX_FORMATS):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8])
        content = data[place + 8 : place + 8 + size]
        if name == b"fmt ":
            content, width = _format(content)
        elif name == b"data":
            content = _reversed(content, width)
        if name in (b"fmt ", b"data"):
            chunks.append(name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2))
        if name == b"data":
            break
        place += 8 + size + size % 2
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _format(content: bytes) -> tuple[bytes, int]:
    """Return a big-endian format as a little-endian one, and the size in bytes of a sample."""
    if len(content) < _FORMAT.size:
        raise MediaError("the format of the RIFX file is truncated")
    fields = struct.unpack_from(">" + _FIELDS, content)
    codec, bits = fields[0], fields[5]
    if codec == _EXTENSIBLE:
        codec = int.from_bytes(content[24:28])
    if codec not in _PLAIN or bits % 8:
        raise MediaError(
            f"the RIFX file has samples with the codec {codec} of {bits} bits; supported: {', '.join(_PLAIN.values())}"
        )
    return _FORMAT.pack(codec, *fields[1:]), bits // 8


def _reversed(samples: bytes, width: int) -> bytes:
    if not width:
        raise MediaError("the RIFX file has samples before their format")
    whole = len(samples) - len(samples) % width
    return np.frombuffer(samples, np.uint8, whole).reshape(-1, width)[:, ::-1].tobytes()
