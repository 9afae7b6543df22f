"""Removal of the chunks of a PNG that have no part in its pixels.

Pillow limits texts to 1 MiB, and color profiles, too. Editors and generators of images write larger ones.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.segments import PNG_START, check_parts

MAX_TEXT_BYTES = 2**24
"""Maximum size in bytes of all decompressed texts of an image that may contain the orientation."""
_UNUSED = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
_XMP, _EXIF = b"XML:com.adobe.xmp", b"Raw profile type exif"
_WITH_ORIENTATION = (_XMP + b"\0", _EXIF + b"\0")
"""Keywords of texts that may contain the orientation of the image."""
_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)[0-9]')
"""The orientation in XMP, as Pillow finds it."""
_LANGUAGE_AND_KEYWORD = re.compile(rb"[^\0]*\0[^\0]*\0")
"""Fields of an iTXt chunk between the compression and the text."""
_OVERLAP = 32
"""More bytes than an orientation has."""
_BLOCK = 2**10
"""Number of bytes to decompress at a time. They become at most about 1 MiB."""


def without_texts(png: bytes) -> bytes:
    """Return `png` without its texts and its color profile, which this package does not apply.

    Of XMP, only the orientation is kept. EXIF data are kept without compression, because Pillow limits only compressed
    texts to 1 MiB.

    Raises:
        LimitExceeded: The texts that may contain the orientation have more than `MAX_TEXT_BYTES` bytes together, or the
            file has more than `MAX_PARTS` chunks.
        zlib.error: A compressed text is broken.

    """
    if not any(kind in png for kind in _UNUSED):
        return png
    check_parts(png)  # before the loop over the chunks
    pieces: list[bytes | memoryview] = []
    view, behind, inflation = memoryview(png), 0, _Inflation()
    for kind, start, stop in _chunks(png):
        if kind in _UNUSED:
            kept = png.startswith(_WITH_ORIENTATION, start + 8, stop - 4)
            pieces += [view[behind:start], _kept(kind, view[start + 8 : stop - 4], inflation) if kept else b""]
            behind = stop
    return b"".join([*pieces, view[behind:]])


def _chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind, start and stop of each whole chunk up to IEND, after which decoders read nothing."""
    start, kind = len(PNG_START), b""
    while kind != b"IEND" and (stop := start + 12 + int.from_bytes(png[start : start + 4])) <= len(png):
        kind = png[start + 4 : start + 8]
        yield kind, start, stop
        start = stop


class _Inflation:
    """Decompression of the texts of an image, with a limit on their total size."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """Yield the decompressed text in pieces, so that it need not be in memory as a whole."""
        stream = zlib.decompressobj()
        for start in range(0, len(data), _BLOCK):
            piece = stream.decompress(data[start : start + _BLOCK])
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_TEXT_BYTES:
                raise LimitExceeded(
                    f"the XMP and EXIF texts of the PNG have more bytes than the limit of {MAX_TEXT_BYTES} when they "
                    "are decompressed; remove them from the image"
                )
            yield piece
            if stream.eof:
                return


def _kept(kind: bytes, content: memoryview, inflation: _Inflation) -> bytes:
    """Return a small text chunk that replaces a chunk of kind `kind`.

    It has the orientation from XMP, or the EXIF data.
    """
    keyword = _XMP if bytes(content[: len(_XMP)]) == _XMP else _EXIF
    text = _pieces(kind, content[len(keyword) + 1 :], inflation)
    return _chunk(b"tEXt", keyword + b"\0" + (_orientation(text) if keyword is _XMP else b"".join(text)))


def _pieces(kind: bytes, rest: memoryview, inflation: _Inflation) -> Iterator[bytes | memoryview]:
    """Return the text of a chunk in pieces. `rest` is the part of the chunk after the keyword."""
    is_compressed = kind == b"zTXt"
    if is_compressed:
        rest = rest[1:]
    elif kind == b"iTXt":
        is_compressed = bytes(rest[:1]) != b"\0"
        if (names := _LANGUAGE_AND_KEYWORD.match(rest, 2)) is None:
            return iter(())
        rest = rest[names.end() :]
    return inflation.pieces(rest) if is_compressed else iter([rest])


def _orientation(text: Iterator[bytes | memoryview]) -> bytes:
    """Return the part of XMP that states the orientation, or nothing."""
    behind = b""
    for piece in text:
        if (found := _ORIENTATION.search(behind + piece if behind else piece)) is not None:
            return bytes(found[0])
        behind = (behind + bytes(piece[-_OVERLAP:]))[-_OVERLAP:]
    return b""


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
