"""Conversion of images of any mode to 8-bit RGB, with a background for transparency and scaling of deep samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindie_mm.settings.config import Colour

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
"""Transpositions that turn an image upright, by EXIF orientation. Files may hold values that are not listed."""
_DEEP_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I", "F"})
"""Greyscale modes with more than 8 bits, which Pillow would clip at 255."""
_WITH_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA", "P", "RGB", "L", "1"})
"""Modes that may have transparent pixels, through an alpha channel, a palette or a transparent colour."""
_PNG_DEPTH = re.compile(r"(?:L|RGB);(\d+)B?")
"""Pillow's raw modes for PNG samples that are not 8 bits wide."""


def pil_to_rgb(image: Image.Image, background: Colour | None, significant_bits: int | None = None) -> Image.Image:
    """Return `image` upright, as 8-bit RGB.

    The result is that of `transformers.image_utils.load_image`, with three differences:

    - Transparent pixels show `background`, as in vLLM and qwen-vl-utils. load_image drops the alpha channel, and most
      writers leave black under it. A `background` of None drops it too.
    - Greyscale samples of more than 8 bits are scaled to 8 bits, from `significant_bits` if the file states them.
      Pillow would clip them to white.
    - Only the orientation is read from the EXIF. ImageOps.exif_transpose rewrites all other entries, and fails if one
      of them has a wrong type.
    """
    image.load()  # for a TIFF this applies the orientation and removes it
    if (turn := _TURNS.get(image.getexif().get(_ORIENTATION_TAG))) is not None:
        image = image.transpose(turn)
    if image.mode in _DEEP_MODES:
        image = _shallow(image, significant_bits)
    if background is not None and image.has_transparency_data and image.mode in _WITH_ALPHA:
        return _on_background(image, background)
    return image if image.mode == "RGB" else image.convert("RGB")  # convert copies an RGB image


def orientation_of(image: Image.Image) -> Any:
    """Return the EXIF orientation of `image`, or 1 if it has none."""
    return image.getexif().get(_ORIENTATION_TAG, 1)


def states_orientation_in_tiff(image: Image.Image) -> bool:
    """Return whether a TIFF tag states the orientation. Pillow then reports the upright size."""
    return _ORIENTATION_TAG in getattr(image, "tag_v2", ())


def mend_transparency(image: Image.Image) -> None:
    """Scale the transparent colour of a PNG (tRNS) to 8 bits. The image must not be loaded yet.

    Pillow keeps the colour at the depth of the file and scales only the pixels, so that no pixel would match it.
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
    """Return the number of significant bits that a greyscale PNG states (sBIT), or None if it states none."""
    place = png.find(b"\0\0\0\1sBIT", 0, max(0, png.find(b"IDAT")))
    bits = png[place + 8] if place >= 0 else 0
    return bits if 1 <= bits <= 16 else None


def _on_background(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode == "La":  # Pillow converts La only to LA
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = Image.new("RGB", image.size, tuple(background))
    rgb.paste(rgba, mask=rgba.getchannel("A"))
    return rgb


def _shallow(image: Image.Image, significant_bits: int | None) -> Image.Image:
    """Return an image of a deep mode as 8-bit grey, with alpha if it has a transparent value."""
    deep = np.asarray(image)
    grey = Image.fromarray(scaled_floats(deep) if deep.dtype.kind == "f" else scaled_integers(deep, significant_bits))
    if isinstance(value := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray(np.where(deep == value, 0, 255).astype(np.uint8)))
    return grey


def scaled_integers(deep: NDArray[np.integer[Any]], significant_bits: int | None) -> NDArray[np.uint8]:
    """Scale integers to uint8, from `significant_bits` or else from the fewest bits, at least 8, that hold all values.

    Most writers store 10, 12 or 14 bits unscaled in 16. Values up to 255 are kept, as in Pillow.
    """
    offset = min(0, int(deep.min()))
    found = (int(deep.max()) - offset).bit_length()
    if significant_bits is None:
        bits = max(8, found)
    elif found <= significant_bits:
        bits = significant_bits
    else:  # the writer scaled the samples to the full range, as the PNG specification asks
        bits = 8 * deep.dtype.itemsize
    values = deep.astype(np.int64) - offset if offset else deep
    scaled = values >> (bits - 8) if bits >= 8 else values.astype(np.int64) * 255 // (2**bits - 1)
    return scaled.astype(np.uint8)


def scaled_floats(deep: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Scale floats to uint8.

    Values from 0 to 1 are fractions of white, and values from 0 to 255 are kept. Other values are scaled to fill the
    range. NaN and infinities become 0 before scaling.
    """
    numbers = np.where(np.isfinite(deep), deep, 0).astype(np.float64)
    least, most = min(0.0, float(numbers.min())), float(numbers.max())
    if least < 0 or most > 255:
        numbers = np.rint((numbers - least) * (255 / (most - least)))
    elif most <= 1:
        numbers = np.rint(numbers * 255)
    return numbers.astype(np.uint8)
