"""Selection of an image in a Windows icon. Pillow would choose the same image, but would decode it at once."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.segments import PNG_START

ICON_START = b"\0\0\1\0"
MAX_SIDE = 256
"""Maximum side length in pixels of a bitmap in an icon. Larger images are stored as PNG."""
_ENTRY = "<BBBBHHII"


def picture_of_icon(data: bytes) -> bytes:
    """Return the largest image of the icon `data`, as a PNG or as an icon that contains only this bitmap.

    Pillow decodes an icon when it opens the file, before the size can be checked. Among images of equal size, this
    function chooses the image with the fewest colors, as Pillow does.

    Raises:
        LimitExceeded: The bitmap is wider or higher than `MAX_SIDE`.
        ValueError: The icon is broken.
        struct.error: The icon is truncated.

    """
    _, num_bytes, offset = max(_entries(data))
    picture = data[offset:]
    if picture.startswith(PNG_START):
        return picture
    width, height = _size_of_bitmap(picture)
    if max(width, height) > MAX_SIDE:
        raise LimitExceeded(f"the icon's bitmap has {width}x{height} pixels; the limit is {MAX_SIDE}x{MAX_SIDE}")
    (bits,) = struct.unpack_from("<H", picture, 14 if picture[0] > 12 else 10)
    head = ICON_START + struct.pack("<H", 1)
    entry = struct.pack(_ENTRY, width % MAX_SIDE, height % MAX_SIDE, 0, 0, 1, bits, num_bytes, len(head) + 16)
    return head + entry + picture[:num_bytes]


def _entries(data: bytes) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield three values for each image: the sort key by which Pillow chooses, the size in bytes and the offset."""
    (num_pictures,) = struct.unpack_from("<H", data, 4)
    for place in range(num_pictures):
        width, height, colours, _, _, bits, num_bytes, offset = struct.unpack_from(_ENTRY, data, 6 + 16 * place)
        depth = bits or (math.ceil(math.log2(colours)) if colours else 0) or 256
        yield ((width or 256) * (height or 256), -depth), num_bytes, offset


def _size_of_bitmap(bitmap: bytes) -> tuple[int, int]:
    """Return the width and height of a bitmap. The height in the header includes both the bitmap and its mask."""
    (head,) = struct.unpack_from("<I", bitmap)
    width, height = struct.unpack_from("<HH" if head == 12 else "<ii", bitmap, 4)
    if width <= 0 or abs(height) < 2:
        raise ValueError("a bitmap without a size")
    return width, abs(height) // 2
