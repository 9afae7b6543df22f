"""Selection of an image in a Windows icon. Pillow would choose the same image, but would decode it at once."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.segments import PNG_START

ICON_START = b"\0\0\1\0"
MAX_SIDE = 256
"""Maximum side length in pixels of a bitmap in an icon. Larger images are stored as PNG."""
_ENTRY = "<BBBBHHII"


def image_of_icon(data: bytes) -> bytes:
    """Return the largest image of the icon `data`, as a PNG or as an icon that contains only this bitmap.

    Pillow decodes an icon when it opens the file, before the size can be checked. Among images of equal size, this
    function chooses the image with the fewest colors, as Pillow does.

    Raises:
        LimitExceeded: The bitmap is wider or higher than `MAX_SIDE`.
        ValueError: The icon is broken.
        struct.error: The icon is truncated.

    """
    _, num_bytes, offset = max(_entries(data))
    image = data[offset:]
    if image.startswith(PNG_START):
        return image
    width, height = _size_of_bitmap(image)
    if max(width, height) > MAX_SIDE:
        raise LimitExceeded(f"the icon's bitmap has {width}x{height} pixels; the limit is {MAX_SIDE}x{MAX_SIDE}")
    (bits,) = struct.unpack_from("<H", image, 14 if image[0] > 12 else 10)
    if bits == 32:
        image = _with_alpha(image[:num_bytes], width, height)
    head = ICON_START + struct.pack("<H", 1)
    entry = struct.pack(_ENTRY, width % MAX_SIDE, height % MAX_SIDE, 0, 0, 1, bits, num_bytes, len(head) + 16)
    return head + entry + image[:num_bytes]


def _entries(data: bytes) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield three values for each image: Pillow's sort key, the size in bytes and the offset."""
    (num_images,) = struct.unpack_from("<H", data, 4)
    for place in range(num_images):
        width, height, colours, _, _, bits, num_bytes, offset = struct.unpack_from(_ENTRY, data, 6 + 16 * place)
        depth = bits or (math.ceil(math.log2(colours)) if colours else 0) or 256
        yield ((width or 256) * (height or 256), -depth), num_bytes, offset


def _with_alpha(bitmap: bytes, width: int, height: int) -> bytes:
    """Return a bitmap with 32 bits per pixel. If its alpha channel is 0 everywhere, the mask replaces the channel.

    Windows does not use an alpha channel that is 0 everywhere. The mask, whose rows have a multiple of 32 bits, follows
    the pixels. A bit is set where a pixel is transparent. If the mask is missing, all pixels become opaque.
    """
    (start,) = struct.unpack_from("<I", bitmap)
    stop = start + 4 * width * height
    if stop > len(bitmap) or any(bitmap[start + 3 : stop : 4]):
        return bitmap
    row_bytes = (width + 31) // 32 * 4
    mask = np.zeros(row_bytes * height, np.uint8)
    given = np.frombuffer(bitmap, np.uint8, offset=stop)[: len(mask)]
    mask[: len(given)] = given
    transparent = np.unpackbits(mask.reshape(height, row_bytes), axis=1)[:, :width]
    pixels = bytearray(bitmap)
    pixels[start + 3 : stop : 4] = np.where(transparent, 0, 255).astype(np.uint8).tobytes()
    return bytes(pixels)


def _size_of_bitmap(bitmap: bytes) -> tuple[int, int]:
    """Return the width and height of a bitmap. The height in the header includes both the bitmap and its mask."""
    (head,) = struct.unpack_from("<I", bitmap)
    width, height = struct.unpack_from("<HH" if head == 12 else "<ii", bitmap, 4)
    if width <= 0 or abs(height) < 2:
        raise ValueError("a bitmap of the icon has no size")
    return width, abs(height) // 2
