"""The parts of a picture's file: what they make a decoder do is bounded before it starts.

A part of four bytes costs Pillow a turn of a Python loop, a scan of ten costs libjpeg a pass over all coefficients.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator

import numpy as np

from mindie_mm.errors import LimitExceeded

MAX_PARTS = 100_000
"""Most segments of a JPEG's head, chunks of a PNG, blocks of a GIF before its first frame, entries or strips of a TIFF:
about half a second of Pillow's. What it searches or takes apart byte by byte counts by bytes."""
MAX_SCANS = 20
"""Scans that a JPEG of any size may have. libjpeg writes a progressive one in 10, and in 18 if it has four colours."""
MAX_SCAN_PIXELS = 2**28
"""Most pixels of a JPEG times its scans where these are more than MAX_SCANS. A pixel of a scan takes 1 to 2 ns, and a
JPEG that is not quite regular is decoded twice."""

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
_GIF_STARTS = (b"GIF87a", b"GIF89a")
_TIFF_STARTS = (b"II", b"MM")

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # 00 and RSTn belong to a scan's data; FF before a marker fills up
_SOS, _EOI, _TEM, _DQT, _APP1, _APP13 = 0xDA, 0xD9, 0x01, 0xDB, 0xE1, 0xED
_WITH_LENGTH = frozenset({*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDA, 0xF0), 0xFE})
_EXIF_PARTS = 1000
"""What a segment of EXIF, up to 64 KiB, counts for: Pillow copies all those before it. Real files have one or two."""
_SCAN_MARGIN = 64
"""Added to a JPEG's sides: blocks that stick out, and what a scan costs however few pixels it has."""
_STRIP_TAGS = frozenset({273, 279, 324, 325})
"""TIFF: where strips and tiles stand, and of how many bytes they are."""


def check_parts(data: bytes) -> None:
    """LimitExceeded for a picture, told by content, of more parts than MAX_PARTS. What is broken passes."""
    if data.startswith(JPEG_START):
        jpeg_head(data)
    elif data.startswith(PNG_START):
        _check_png(data)
    elif data.startswith(_GIF_STARTS):
        _check_gif(data)
    elif data.startswith(_TIFF_STARTS):
        _check_tiff(data)


def jpeg_head(data: bytes) -> int:
    """Bytes of a JPEG before its first scan, all of them if it has none. LimitExceeded for more than MAX_PARTS.

    The steps are those of Pillow's reader, which goes over bytes outside of segments one by one.
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
        _check_parts("JPEG's head", "segments and bytes between them", num_parts)
        behind = stop
    _check_parts("JPEG's head", "segments and bytes between them", num_parts + len(data) - behind)
    return len(data)


def check_scans(data: bytes, width: int, height: int, *, up_to_end: bool = False) -> None:
    """LimitExceeded for a JPEG of more scans than its size allows; `width` and `height` as its own frame header says.

    Scan markers count wherever they stand in `data`, as a decoder may find them. `up_to_end` is for libjpeg, which
    skips segments by their length and stops at the end of the image: there other pictures, or a film, may follow.
    """
    limit = max(MAX_SCANS, MAX_SCAN_PIXELS // ((width + _SCAN_MARGIN) * (height + _SCAN_MARGIN)))
    num_scans = _scan_markers(data)
    if num_scans > limit and up_to_end:
        num_scans = _scans_up_to_end(data, num_scans)
    if num_scans > limit:
        raise LimitExceeded(f"the JPEG of {width}x{height} pixels has {num_scans} scans; the limit is {limit}")


def _scan_markers(data: bytes) -> int:
    """How often FF DA is in `data`: as numbers of two bytes, from even places and from odd; bytes.count is slow."""
    num = 0
    for start in (0, 1)[: max(len(data) - 1, 0)]:
        pairs = np.frombuffer(data, "<u2", (len(data) - start) // 2, start)
        num += sum(int(np.count_nonzero(pairs[at : at + 2**18] == 0xDAFF)) for at in range(0, len(pairs), 2**18))
    return num


def _scans_up_to_end(data: bytes, num_markers: int) -> int:
    """Scans that libjpeg finds; all `num_markers` where the walk meets what it is not sure of."""
    num_scans = 0
    for place, (kind, _, _) in enumerate(_segments(data)):
        if kind == _EOI:
            return num_scans
        if (kind not in _WITH_LENGTH and kind != _TEM) or place > MAX_PARTS:
            return num_markers
        num_scans += kind == _SOS
    return num_scans


def _segments(data: bytes, reach: int = sys.maxsize) -> Iterator[tuple[int, int, int]]:
    """Kind, start and stop of what begins with a marker, behind a JPEG's start, at most `reach` bytes between two."""
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
    """Goes as Pillow does: over what is no block byte by byte, and up to the first frame."""
    palette = 3 << (data[10] & 7) + 1 if data[10:11] >= b"\x80" else 0
    place, num_parts = 13 + palette, 0
    while (kind := data[place : place + 1]) not in {b",", b";", b""}:
        place += 2 if kind == b"!" else 1
        size = int.from_bytes(data[place : place + 1]) if kind == b"!" else 0
        while size and num_parts <= MAX_PARTS:  # an extension's sub-blocks, of which one is of no bytes
            place += 1 + size
            size = int.from_bytes(data[place : place + 1])
            num_parts += 1
        place += kind == b"!"
        num_parts += 1
        _check_parts("GIF", "blocks before its first frame", num_parts)


def _check_tiff(data: bytes) -> None:
    """Looks at the directory of the first page, which alone is read."""
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
