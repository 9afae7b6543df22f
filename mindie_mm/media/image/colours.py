"""Conversion of images in any mode to 8-bit RGB, with a background for transparent pixels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindie_mm.settings.config import Colour

ORIENTATION_TAG = 0x0112
_BITS, _PHOTOMETRIC, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 258, 262, 338, 339
_TURNS: Mapping[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions that turn an image upright, by EXIF orientation. Files may contain other values."""
_DEEP_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I", "F"})
"""Grayscale modes with more than 8 bits per sample, which Pillow would clip at 255."""
_WITH_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA", "P", "RGB", "L", "1"})
"""Modes in which pixels can be transparent, because of an alpha channel, a palette or a transparent color."""
_LITTLE_ENDIAN: Mapping[Any, str] = {"I;16BS": "I;16S", "I;32BS": "I;32S", "F;32BF": "F;32F", "F;64BF": "F;64F"}
"""Pillow's raw modes for little-endian samples, by those for big-endian samples."""
_PNG_DEPTH = re.compile(r"(?:L|RGB);(\d+)B?")
"""Pillow's raw modes for PNG samples that do not have 8 bits."""


def pil_to_rgb(
    image: Image.Image, background: Colour | None, significant_bits: int | None = None, *, negative: bool = False
) -> Image.Image:
    """Return `image` upright, as 8-bit RGB.

    The result is the same as that of `transformers.image_utils.load_image`, with five exceptions:

    - Transparent pixels show `background`, as in vLLM and qwen-vl-utils. load_image drops the alpha channel, and
      transparent pixels then become black in most files. If `background` is None, this function drops the alpha
      channel, too.
    - Grayscale samples of more than 8 bits are scaled to 8 bits. `significant_bits` is the number of bits per sample,
      if known. Pillow would clip large values to white.
    - Grayscale samples of more than 8 bits are inverted if 0 is white: if a TIFF says so, or if `negative` is true.
      Pillow inverts only samples of up to 8 bits.
    - An alpha channel that is 0 everywhere is dropped if its file need not have one, because writers of such files
      leave the channel unused.
    - Only the orientation is read from the EXIF data. ImageOps.exif_transpose rewrites all other entries, and fails if
      an entry has a wrong type.
    """
    image.load()  # for a TIFF, this applies the orientation and removes it from the EXIF data
    is_white_zero = _tag_of(image, _PHOTOMETRIC) == 0
    if image.mode == "RGBA" and _may_be_unused(image) and image.getchannel("A").getextrema() == (0, 0):
        image = image.convert("RGB")
    if (turn := _TURNS.get(image.getexif().get(ORIENTATION_TAG))) is not None:
        image = image.transpose(turn)
    if image.mode in _DEEP_MODES:
        image = _shallow(image, significant_bits, negative=negative or is_white_zero)
    if background is not None and image.has_transparency_data and image.mode in _WITH_ALPHA:
        return on_background(image, background)
    return image if image.mode == "RGB" else image.convert("RGB")  # `convert` would copy an RGB image


def orientation_of(image: Image.Image) -> Any:
    """Return the EXIF orientation of `image`, or 1 if the image has none."""
    return image.getexif().get(ORIENTATION_TAG, 1)


def states_orientation_in_tiff(image: Image.Image) -> bool:
    """Return whether a TIFF tag states the orientation. Pillow then reports the upright size."""
    return ORIENTATION_TAG in getattr(image, "tag_v2", ())


def mend_transparency(image: Image.Image) -> None:
    """Scale the transparent color of a PNG (tRNS) to 8 bits. Call this function before the image is loaded.

    Pillow scales the pixels, but not the transparent color. Without this function, no pixel would match the color.
    """
    colour = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    raw_mode = tiles[0][3] if image.format == "PNG" and tiles else None
    if not isinstance(raw_mode, str) or (match := _PNG_DEPTH.fullmatch(raw_mode)) is None:
        return
    depth = int(match[1])

    def in_eight_bits(value: int) -> int:
        return value >> 8 if depth > 8 else value * 255 // (2**depth - 1)  # Pillow keeps the upper byte

    if isinstance(colour, int):
        image.info["transparency"] = in_eight_bits(colour)
    elif isinstance(colour, tuple):
        image.info["transparency"] = tuple(map(in_eight_bits, colour))


def mend_byte_order(image: Image.Image) -> None:
    """Correct the byte order of a compressed TIFF with signed integers or floats. Call this before the image is loaded.

    libtiff returns samples in the byte order of the machine, which is little-endian on all supported machines. Pillow
    reads the samples of a big-endian file as big-endian.
    """
    tiles = getattr(image, "tile", ())
    if image.format == "TIFF" and tiles and tiles[0].codec_name == "libtiff" and tiles[0].args[0] in _LITTLE_ENDIAN:
        image.tile = [  # type: ignore[attr-defined] # an attribute of ImageFile
            tile._replace(args=(_LITTLE_ENDIAN[tile.args[0]], *tile.args[1:])) for tile in tiles
        ]


def significant_bits_of(png: bytes) -> int | None:
    """Return the number of significant bits in the sBIT chunk of a grayscale PNG, or None if the PNG has no sBIT."""
    place = png.find(b"\0\0\0\1sBIT", 0, max(0, png.find(b"IDAT")))
    bits = png[place + 8] if place >= 0 else 0
    return bits if 1 <= bits <= 16 else None


def on_background(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode == "La":  # Pillow converts La only to LA
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = Image.new("RGB", image.size, tuple(background))
    rgb.paste(rgba, mask=rgba.getchannel("A"))
    return rgb


def _may_be_unused(image: Image.Image) -> bool:
    """Return whether the fourth channel may be something else than alpha.

    In a bitmap with 32 bits per pixel, it often is padding, even if the header has a mask for it. In a TIFF without the
    tag ExtraSamples, its meaning is unknown.
    """
    return image.format in {"BMP", "DIB"} or (image.format == "TIFF" and not _tag_of(image, _EXTRA_SAMPLES))


def _tag_of(image: Image.Image, tag: int) -> Any:
    """Return the value of a tag of a TIFF. Return None for other images, and if the tag is missing."""
    return getattr(image, "tag_v2", {}).get(tag)


def _shallow(image: Image.Image, significant_bits: int | None, *, negative: bool) -> Image.Image:
    """Convert an image in a deep mode to 8-bit grayscale, with an alpha channel if one value is transparent.

    `negative` says whether 0 is white.
    """
    deep = np.asarray(image)
    if deep.dtype == np.int32 and _tag_of(image, _BITS) == (32,) and _tag_of(image, _SAMPLE_FORMAT) in {None, (1,)}:
        deep = deep.view(np.uint32)  # Pillow has no mode for these samples
    shallow = scaled_floats(deep) if deep.dtype.kind == "f" else scaled_integers(deep, significant_bits)
    grey = Image.fromarray(255 - shallow if negative else shallow)
    if isinstance(value := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray(np.where(deep == value, 0, 255).astype(np.uint8)))
    return grey


def scaled_integers(deep: NDArray[np.integer[Any]], significant_bits: int | None) -> NDArray[np.uint8]:
    """Scale integers to uint8.

    `significant_bits` is the number of bits of the integers. If it is None, this function uses the smallest number of
    bits, at least 8, that holds all values, because most writers store samples of 10, 12 or 14 bits unscaled in 16
    bits. If all values are at most 255, they are then kept, as in Pillow.
    """
    offset = min(0, int(deep.min()))
    num_bits = (int(deep.max()) - offset).bit_length()
    if significant_bits is None:
        bits = max(8, num_bits)
    elif num_bits <= significant_bits:
        bits = significant_bits
    else:  # the writer has scaled the samples to the full range, as the PNG specification requires
        bits = 8 * deep.dtype.itemsize
    values = deep.astype(np.int64) - offset if offset else deep
    scaled = values >> (bits - 8) if bits >= 8 else values.astype(np.int64) * 255 // (2**bits - 1)
    return scaled.astype(np.uint8)


def scaled_floats(deep: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Scale floats to uint8.

    If all values are from 0 to 1, they are multiplied by 255. If all values are from 0 to 255, they are kept. Otherwise
    they are scaled so that they fill the range from 0 to 255. NaN and infinity become 0 before scaling.
    """
    numbers = np.where(np.isfinite(deep), deep, 0).astype(np.float64)
    least, most = min(0.0, float(numbers.min())), float(numbers.max())
    if least < 0 or most > 255:
        numbers = np.rint((numbers - least) * (255 / (most - least)))
    elif most <= 1:
        numbers = np.rint(numbers * 255)
    return numbers.astype(np.uint8)
