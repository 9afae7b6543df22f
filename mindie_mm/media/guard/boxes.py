"""Limits on the boxes of JPEG 2000, AVIF and HEIC files, checked before a decoder runs."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded

MAX_BOXES = 1000
"""Maximum number of boxes before the codestream of a JPEG 2000 file. Pillow reads each box."""
MAX_JPEG2000_PIXELS = 2**26
"""Maximum number of pixels of a JPEG 2000 image. OpenJPEG takes 20 bytes and 30 ns per pixel, even for a tiny file."""
MAX_TABLE_BYTES = 2**17
"""Maximum size in bytes of the tables of an AVIF or HEIC file, including its color profile.

For each item or chunk, libavif searches the tables from the beginning. Real tables have a few hundred bytes.
"""

JP2_START = b"\0\0\0\x0cjP  \r\n\x87\n"
J2K_START = b"\xff\x4f\xff\x51"
_SIZ = ">4xHHIIIIIIIIH"
_MAX_COMPONENTS = 4
_TABLES = (b"meta", b"moov")


def check_boxes(data: bytes) -> tuple[int, int] | None:
    """Check the limits of a JPEG 2000, AVIF or HEIC file. Other files pass.

    Returns:
        Width and height of the codestream of a JPEG 2000 file. None for any other file.

    Raises:
        LimitExceeded: Decoding would take too much memory or time.
        ValueError: A JPEG 2000 file is broken.
        struct.error: A JPEG 2000 file is broken.

    """
    if data.startswith(J2K_START):
        return _check_codestream(data, 0)
    if data.startswith(JP2_START):
        return _check_codestream(data, _find_codestream(data))
    if data[4:8] == b"ftyp":
        num_bytes = sum(stop - start for kind, start, stop in boxes(data, 0, len(data)) if kind in _TABLES)
        if num_bytes > MAX_TABLE_BYTES:
            raise LimitExceeded(
                f"the AVIF or HEIC image has {num_bytes} bytes of tables; the limit is {MAX_TABLE_BYTES}"
            )
    return None


def _find_codestream(data: bytes) -> int:
    num_boxes = 0
    for kind, start, stop in boxes(data, 0, len(data)):
        if kind == b"jp2c":
            return start
        num_boxes += 1
        if kind == b"jp2h":
            num_boxes += sum(1 for _ in boxes(data, start, stop))
        if num_boxes > MAX_BOXES:
            raise LimitExceeded(f"the JPEG 2000 image has {num_boxes} or more boxes; the limit is {MAX_BOXES}")
    raise ValueError("no codestream")


def _check_codestream(data: bytes, start: int) -> tuple[int, int]:
    """Return width and height: the reference grid minus the image offset (ISO/IEC 15444-1, A.5.1)."""
    if not data.startswith(J2K_START, start):
        raise ValueError("no codestream")
    _, _, right, bottom, left, top, *_, components = struct.unpack_from(_SIZ, data, start)
    width, height = right - left, bottom - top
    if width * height > MAX_JPEG2000_PIXELS:
        raise LimitExceeded(
            f"the JPEG 2000 image has {width}x{height} = {width * height} pixels; the limit of the format is "
            f"{MAX_JPEG2000_PIXELS}"
        )
    if components > _MAX_COMPONENTS:
        raise ValueError("too many components")
    return width, height


def boxes(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each box and the start and stop of its content, up to the first broken box.

    ISO/IEC 14496-12, 4.2 defines boxes.
    """
    while start + 8 <= stop:
        size, kind = struct.unpack_from(">I4s", data, start)
        head = 8
        if size == 1 and start + 16 <= stop:
            (size,) = struct.unpack_from(">Q", data, start + 8)
            head = 16
        end = min(start + size, stop) if size else stop
        if end < start + head:
            return
        yield kind, start + head, end
        start = end
