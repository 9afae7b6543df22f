"""Pictures of any mode as 8-bit RGB: what is transparent on a background, what has more than 8 bits scaled down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindie_mm.config import Colour

_ORIENTATION_TAG = 0x0112
_TURNS: Mapping[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture of that orientation upright; a file may hold any value."""
_DEEP_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I", "F"})
"""Grey of more than 8 bits, which Pillow would clip at 255."""
_WITH_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA", "P", "RGB", "L", "1"})
"""Modes that may have transparent pixels: by a channel, by their palette, or by the colour that a file names."""
_PNG_DEPTH = re.compile(r"(?:L|RGB);(\d+)B?")
"""What Pillow calls the samples of a PNG that are not of 8 bits."""


def pil_to_rgb(image: Image.Image, background: Colour, significant_bits: int | None = None) -> Image.Image:
    """Return `image` upright, as RGB: as `transformers.image_utils.load_image` does it, but for three things.

    Transparent pixels show the `background`, as in vLLM and qwen-vl-utils. load_image drops the alpha, and most writers
    leave black under it. Grey of more than 8 bits is scaled to 8, from `significant_bits` where the file states them.
    Pillow would clip it to white. Only the orientation is asked for of the EXIF. ImageOps.exif_transpose writes the
    rest anew, and fails where an entry is of a wrong type.
    """
    image.load()  # a TIFF is made upright by this, and its orientation forgotten
    if (turn := _TURNS.get(image.getexif().get(_ORIENTATION_TAG))) is not None:
        image = image.transpose(turn)
    if image.mode in _DEEP_MODES:
        image = _shallow(image, significant_bits)
    if image.has_transparency_data and image.mode in _WITH_ALPHA:
        return _on_background(image, background)
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies, where there is nothing to convert


def orientation_of(image: Image.Image) -> Any:
    """Return the EXIF orientation of `image`; 1 where it states none."""
    return image.getexif().get(_ORIENTATION_TAG, 1)


def states_orientation_in_tiff(image: Image.Image) -> bool:
    """Say whether a TIFF's own tag has the orientation, for which Pillow gives the upright size."""
    return _ORIENTATION_TAG in getattr(image, "tag_v2", ())


def mend_transparency(image: Image.Image) -> None:
    """Bring the colour that a PNG names as transparent to 8 bits, as its pixels will be. For a file not loaded yet.

    Pillow leaves it in the depth of the file, where no pixel has it.
    """
    colour = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    raw_mode = tiles[0][3] if image.format == "PNG" and tiles else None
    if not isinstance(raw_mode, str) or (found := _PNG_DEPTH.fullmatch(raw_mode)) is None:
        return
    depth = int(found[1])

    def in_eight_bits(value: int) -> int:
        return value >> 8 if depth > 8 else value * 255 // (2**depth - 1)  # Pillow keeps the upper byte

    if isinstance(colour, int):
        image.info["transparency"] = in_eight_bits(colour)
    elif isinstance(colour, tuple):
        image.info["transparency"] = tuple(map(in_eight_bits, colour))


def significant_bits_of(png: bytes) -> int | None:
    """Return how many bits of a grey PNG's samples the file says are significant (sBIT); None where it does not say."""
    place = png.find(b"\0\0\0\1sBIT", 0, max(0, png.find(b"IDAT")))
    bits = png[place + 8] if place >= 0 else 0
    return bits if 1 <= bits <= 16 else None


def _on_background(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode == "La":  # of which Pillow makes LA alone
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = Image.new("RGB", image.size, tuple(background))
    rgb.paste(rgba, mask=rgba.getchannel("A"))
    return rgb


def _shallow(image: Image.Image, significant_bits: int | None) -> Image.Image:
    """`image`, of a deep mode, in 8 bits of grey, and with alpha where one value is transparent."""
    deep = np.asarray(image)
    grey = Image.fromarray(scaled_floats(deep) if deep.dtype.kind == "f" else scaled_integers(deep, significant_bits))
    if isinstance(value := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray(np.where(deep == value, 0, 255).astype(np.uint8)))
    return grey


def scaled_integers(deep: NDArray[np.integer[Any]], significant_bits: int | None) -> NDArray[np.uint8]:
    """Return whole numbers as uint8: of `significant_bits`, or of the fewest bits from 8 on that hold all of them.

    Writers of 10, 12 or 14 bits mostly put them into 16 as they are. Values up to 255 stay as they are, as in Pillow.
    """
    offset = min(0, int(deep.min()))
    found = (int(deep.max()) - offset).bit_length()
    if significant_bits is None:
        bits = max(8, found)
    elif found <= significant_bits:
        bits = significant_bits
    else:  # a writer that follows the PNG specification has scaled them to the whole range
        bits = 8 * deep.dtype.itemsize
    values = deep.astype(np.int64) - offset if offset else deep
    scaled = values >> (bits - 8) if bits >= 8 else values.astype(np.int64) * 255 // (2**bits - 1)
    return scaled.astype(np.uint8)


def scaled_floats(deep: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Return floats as uint8: those of 0 to 1 are shares of white, those up to 255 stay, others fill the range.

    What is no number is black.
    """
    numbers = np.where(np.isfinite(deep), deep, 0).astype(np.float64)
    least, most = min(0.0, float(numbers.min())), float(numbers.max())
    if least < 0 or most > 255:
        numbers = np.rint((numbers - least) * (255 / (most - least)))
    elif most <= 1:
        numbers = np.rint(numbers * 255)
    return numbers.astype(np.uint8)
