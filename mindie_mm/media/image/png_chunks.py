"""Removal of the chunks of a PNG that have no part in its pixels, and moving of its orientation before the pixels.

Pillow limits texts to 1 MiB, and color profiles, too. Editors and generators of images write larger ones. To find an
orientation behind the pixels, Pillow decodes them.
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
_EXIF_CHUNK = b"eXIf"
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


def with_tidy_chunks(png: bytes) -> bytes:
    """Return `png` without its texts and its color profile, and with its orientation before the pixels.

    This package does not apply color profiles. Only the orientation is kept from XMP. EXIF data are kept without
    compression, because Pillow limits only compressed texts to 1 MiB. XMP and EXIF data move before the pixels if
    Pillow would find them behind the pixels. Pillow does not search there if an eXIf chunk precedes the pixels, and it
    searches an animation only up to its next frame.

    Raises:
        LimitExceeded: The texts that may contain the orientation have more than `MAX_TEXT_BYTES` bytes together, or the
            file has more than `MAX_PARTS` chunks.
        zlib.error: A compressed text is broken.

    """
    check_parts(png)  # before the loop over the chunks
    front: list[bytes | memoryview] = []
    rest: list[bytes | memoryview] = []
    view, behind, inflation = memoryview(png), 0, _Inflation()
    has_exif = is_animated = is_over = is_changed = False
    pieces = front
    for kind, start, stop in _chunks(png):
        if kind == b"IDAT" and pieces is front:
            front.append(view[behind:start])
            pieces, behind = rest, start
        elif kind == b"acTL":
            is_animated = png[start + 8 : start + 12] > b"\0\0\0\1"
        elif kind == b"fcTL" and pieces is rest:
            is_over = is_over or is_animated
        elif kind == _EXIF_CHUNK and pieces is front:
            has_exif = True
        elif kind in _UNUSED or kind == _EXIF_CHUNK:
            is_changed = True
            pieces.append(view[behind:start])
            behind = stop
            is_read = pieces is front or not (has_exif or is_over)
            if is_read and (kind == _EXIF_CHUNK or png.startswith(_WITH_ORIENTATION, start + 8, stop - 4)):
                front.append(_kept(kind, view[start + 8 : stop - 4], inflation))
    return b"".join([*front, *rest, view[behind:]]) if is_changed else png


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
    """Return a chunk with what is needed of a chunk of the kind `kind`: the orientation, or the EXIF data."""
    if kind == _EXIF_CHUNK:
        return _chunk(kind, bytes(content))
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
