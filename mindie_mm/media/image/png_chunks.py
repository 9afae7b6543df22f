"""Removal of the chunks of a PNG that have no part in its pixels.

Pillow limits texts to 1 MiB, and color profiles, too. Editors and generators of images write larger ones.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.segments import PNG_START

MAX_TEXT_BYTES = 2**24
"""Maximum size in bytes of a decompressed text that may contain the orientation."""
_UNUSED = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
_WITH_ORIENTATION = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")
"""Keywords of texts that may contain the orientation of the image."""


def without_texts(png: bytes) -> bytes:
    """Return `png` without its texts and its color profile, which this package does not apply.

    Texts that may contain the orientation are kept. They are stored without compression, because Pillow limits only
    compressed texts to 1 MiB.

    Raises:
        LimitExceeded: A text that may contain the orientation has more than `MAX_TEXT_BYTES` bytes.
        zlib.error: A compressed text is broken.

    """
    if not any(kind in png for kind in _UNUSED):
        return png
    pieces, behind = [], 0
    for kind, start, stop in _chunks(png):
        if kind in _UNUSED:
            content = png[start + 8 : stop - 4]
            pieces += [png[behind:start], _kept(kind, content) if content.startswith(_WITH_ORIENTATION) else b""]
            behind = stop
    return b"".join([*pieces, png[behind:]])


def _chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind, start and stop of each whole chunk."""
    start = len(PNG_START)
    while (stop := start + 12 + int.from_bytes(png[start : start + 4])) <= len(png):
        yield png[start + 4 : start + 8], start, stop
        start = stop


def _kept(kind: bytes, content: bytes) -> bytes:
    """Return a chunk with the text of a chunk of the kind `kind`, not compressed."""
    keyword, _, rest = content.partition(b"\0")
    if kind == b"zTXt":
        return _chunk(b"tEXt", keyword + b"\0" + _inflated(rest[1:]))
    if kind == b"iTXt" and rest[:1] == b"\1":
        language, _, translated = rest[2:].partition(b"\0")
        translated, _, text = translated.partition(b"\0")
        return _chunk(b"iTXt", b"\0".join([keyword, b"\0", language, translated, _inflated(text)]))
    return _chunk(kind, content)


def _inflated(data: bytes) -> bytes:
    text = zlib.decompressobj().decompress(data, MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise LimitExceeded(f"a text of the PNG has more bytes than the limit of {MAX_TEXT_BYTES}")
    return text


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
