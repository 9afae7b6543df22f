"""Limits on the parts of an image file, checked before a decoder runs.

For a part of only four bytes, Pillow runs one iteration of a Python loop. For a scan of only ten bytes, libjpeg
processes all coefficients once.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator

import numpy as np

from mindie_mm.errors import LimitExceeded

MAX_PARTS = 100_000
"""Maximum number of parts. Pillow takes about half a second to read this number of parts.

Parts are the segments of a JPEG header, the chunks of a PNG, the blocks of a GIF before its first frame, and the
entries or strips of a TIFF. If Pillow searches or parses data byte by byte, each byte counts as a part.
"""
MAX_SCANS = 20
"""Number of scans that a JPEG of any size may have.

libjpeg writes a progressive JPEG in 10 scans, or in 18 scans if it has four color components.
"""
MAX_SCAN_PIXELS = 2**28
"""Maximum product of pixels and scans of a JPEG with more than `MAX_SCANS` scans.

Decoding takes 1 to 2 ns for each pixel of each scan. An irregular JPEG is decoded twice.
"""

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
_GIF_STARTS = (b"GIF87a", b"GIF89a")
_TIFF_STARTS = (b"II", b"MM")

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # FF 00 and RSTn are scan data, and FF FF is padding
_SOS, _EOI, _TEM, _DQT, _APP1, _APP13 = 0xDA, 0xD9, 0x01, 0xDB, 0xE1, 0xED
_WITH_LENGTH = frozenset({*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDA, 0xF0), 0xFE})
_EXIF_PARTS = 1000
"""Number of parts that an EXIF segment counts as. Real files have one or two such segments, of up to 64 KiB.

For each EXIF segment, Pillow copies all earlier EXIF segments.
"""
_SCAN_MARGIN = 64
"""Number of pixels to add to width and height of a JPEG, for blocks beyond the edge and the fixed cost of a scan."""
_STRIP_TAGS = frozenset({273, 279, 324, 325})
"""TIFF tags with the offsets and sizes of strips and tiles."""


def check_parts(data: bytes) -> None:
    """Check the number of parts of an image file. Its format is detected by content. Broken files pass.

    Raises:
        LimitExceeded: The file has more than `MAX_PARTS` parts.

    """
    if data.startswith(JPEG_START):
        jpeg_head(data)
    elif data.startswith(PNG_START):
        _check_png(data)
    elif data.startswith(_GIF_STARTS):
        _check_gif(data)
    elif data.startswith(_TIFF_STARTS):
        _check_tiff(data)


def jpeg_head(data: bytes) -> int:
    """Return the number of bytes before the first scan of a JPEG, or the size of the file if it has no scan.

    Each byte outside segments counts as a part, because Pillow skips such bytes one by one.

    Raises:
        LimitExceeded: The file has more than `MAX_PARTS` parts.

    """
    num_parts, behind = 0, 2
    for kind, start, stop in _segments(data, MAX_PARTS + 2):
        if kind == _SOS:
            return start
        num_parts += 1 + start - behind
        if kind == _DQT:
            num_parts += stop - start
        elif kind == _APP1 and data.startswith(b"Exif\0\0", start + 4):
            num_parts += _EXIF_PARTS
        elif kind == _APP13:
            num_parts += data.count(b"8BIM", start, stop)
        _check_parts("JPEG header", "segments and bytes between them", num_parts)
        behind = stop
    _check_parts("JPEG header", "segments and bytes between them", num_parts + len(data) - behind)
    return len(data)


def check_scans(data: bytes, width: int, height: int, *, up_to_end: bool = False) -> None:
    """Check the number of scans of a JPEG.

    Args:
        data: The file. Scan markers at any position count, because a decoder may find them.
        width: Width in pixels, as stated in the frame header.
        height: Height in pixels, as stated in the frame header.
        up_to_end: Whether to count only the scans that libjpeg finds. libjpeg skips segments by their length, and stops
            at the end of the image. Other images or a video may follow in the same file.

    Raises:
        LimitExceeded: The JPEG has more scans than its size allows.

    """
    limit = max(MAX_SCANS, MAX_SCAN_PIXELS // ((width + _SCAN_MARGIN) * (height + _SCAN_MARGIN)))
    num_scans = _scan_markers(data)
    if num_scans > limit and up_to_end:
        num_scans = _scans_up_to_end(data, num_scans)
    if num_scans > limit:
        raise LimitExceeded(f"the JPEG of {width}x{height} pixels has {num_scans} scans; the limit is {limit}")


def _scan_markers(data: bytes) -> int:
    """Count occurrences of FF DA in `data`.

    bytes.count would be slow, so this function compares 16-bit numbers at even and at odd offsets.
    """
    num = 0
    for start in (0, 1)[: max(len(data) - 1, 0)]:
        pairs = np.frombuffer(data, "<u2", (len(data) - start) // 2, start)
        num += sum(int(np.count_nonzero(pairs[at : at + 2**18] == 0xDAFF)) for at in range(0, len(pairs), 2**18))
    return num


def _scans_up_to_end(data: bytes, num_markers: int) -> int:
    """Return the number of scans that libjpeg finds, or `num_markers` if this number is uncertain."""
    num_scans = 0
    for place, (kind, _, _) in enumerate(_segments(data)):
        if kind == _EOI:
            return num_scans
        if (kind not in _WITH_LENGTH and kind != _TEM) or place > MAX_PARTS:
            return num_markers
        num_scans += kind == _SOS
    return num_scans


def _segments(data: bytes, reach: int = sys.maxsize) -> Iterator[tuple[int, int, int]]:
    """Yield the kind, start and stop of each segment after the start marker of a JPEG.

    Stop at a gap of more than `reach` bytes.
    """
    place = 2
    while (marker := _MARKER.search(data, place, min(len(data), place + reach))) is not None:
        start, place = marker.span()
        kind = data[place - 1]
        if kind in _WITH_LENGTH:
            place += max(2, int.from_bytes(data[place : place + 2]))
        yield kind, start, place


def _check_png(data: bytes) -> None:
    place, num_parts = len(PNG_START), 0
    while place + 8 <= len(data) and data[place + 4 : place + 8] != b"IEND":
        place += 12 + int.from_bytes(data[place : place + 4])
        num_parts += 1
        _check_parts("PNG", "chunks", num_parts)


def _check_gif(data: bytes) -> None:
    """Check the number of blocks before the first frame. Count other bytes, too, which Pillow skips one by one."""
    palette = 3 << (data[10] & 7) + 1 if data[10:11] >= b"\x80" else 0
    place, num_parts = 13 + palette, 0
    while (kind := data[place : place + 1]) not in {b",", b";", b""}:
        place += 2 if kind == b"!" else 1
        size = int.from_bytes(data[place : place + 1]) if kind == b"!" else 0
        while size and num_parts <= MAX_PARTS:  # sub-blocks of an extension, up to an empty one
            place += 1 + size
            size = int.from_bytes(data[place : place + 1])
            num_parts += 1
        place += kind == b"!"
        num_parts += 1
        _check_parts("GIF", "blocks before its first frame", num_parts)


def _check_tiff(data: bytes) -> None:
    """Check the directory of the first page. Other pages are never read."""
    order, big = "<" if data.startswith(b"II") else ">", b"+" in data[2:4]
    offset, count, entry = ("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")
    entry_bytes = struct.calcsize(order + entry)
    try:
        (place,) = struct.unpack_from(order + offset, data, 8 if big else 4)
        (num_entries,) = struct.unpack_from(order + count, data, place)
    except struct.error:
        return
    place += struct.calcsize(order + count)
    num_entries = min(num_entries, (len(data) - place) // entry_bytes)
    _check_parts("TIFF", "entries", num_entries)
    for tag, _, num_values in struct.iter_unpack(order + entry, data[place : place + num_entries * entry_bytes]):
        if tag in _STRIP_TAGS:
            _check_parts("TIFF", "strips or tiles", min(num_values, len(data)))


def _check_parts(what: str, parts: str, num_parts: int) -> None:
    if num_parts > MAX_PARTS:
        raise LimitExceeded(f"the {what} has {num_parts} or more {parts}; the limit is {MAX_PARTS}")
