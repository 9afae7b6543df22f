"""Decoding and resizing of images: RGB as transformers' `load_image` and its torchvision backend make it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.dlpack import from_dlpack

from mindie_mm.config import MAX_IMAGE_PIXELS, Colour
from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.anymap import ANYMAP_START, Anymap
from mindie_mm.media.boxes import check_boxes
from mindie_mm.media.caps import add_picture, caps, check_pixels
from mindie_mm.media.colours import (
    mend_transparency,
    orientation_of,
    pil_to_rgb,
    significant_bits_of,
    states_orientation_in_tiff,
)
from mindie_mm.media.icons import ICON_START, picture_of_icon
from mindie_mm.media.segments import JPEG_START, MAX_SCANS, PNG_START, check_parts, check_scans, jpeg_head

# Each strip of a TIFF may be a JPEG; libtiff, which asks when it decodes one, would let 100 scans pass.
os.putenv("LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER", str(MAX_SCANS))

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM")
"""Formats that are decoded, told by content. Of others that Pillow reads some have decoders in Python, which take
minutes for some megabytes, and some nothing to be told by."""
_FORMATS_OF_PILLOW = tuple(name for name in FORMATS if name != "PPM")

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3] of an image, [frames, height, width, 3] of a video; RGB."""
Frames = tuple[bytes | Pixels, ...]
"""A video's, each an encoded image or its pixels."""
Data = bytes | NDArray[Any] | Frames
"""What preprocessing starts from: encoded bytes, or pixels, or samples of sound, or a video's frames."""

Resample = Literal["bilinear", "bicubic", "lanczos"]
RESAMPLES: Mapping[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Filters by the number under which Pillow, and so a preprocessor's configuration, knows them."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image whose header was read, and checked against the caps, but that is not decoded yet."""

    height: int
    """Pixels, upright: after the EXIF orientation."""
    width: int
    file: Image.Image
    background: Colour
    """What transparent pixels show."""
    significant_bits: int | None = None
    """Of grey samples of 16 bits, where the file says so."""

    @classmethod
    def open(cls, data: bytes) -> EncodedImage:
        """Reads the header of `data`. MediaError for what is no image, LimitExceeded."""
        try:
            if data.startswith(ICON_START):
                data = picture_of_icon(data)
            file = _open_file(data)
            width, height = file.size
            add_picture(width, height)  # before the orientation is asked for, which may decode
            if data.startswith(JPEG_START):  # whatever Pillow calls it: of several pictures, it is an MPO
                check_scans(data, width, height, up_to_end=True)
            mend_transparency(file)
            orientation = orientation_of(file) if _has_exif(file, data) else 1
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _beyond_pillows_limit() from None
        except (LimitExceeded, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - a hostile header makes decoders raise anything
            raise MediaError(f"the {len(data)} bytes are no readable image ({', '.join(FORMATS)})") from None
        # Where a TIFF's own tag says it, Pillow gives the upright size; not where its XMP does.
        if orientation in {5, 6, 7, 8} and not states_orientation_in_tiff(file):
            width, height = height, width
        significant_bits = significant_bits_of(data) if data.startswith(PNG_START) else None
        return cls(height, width, file, caps().rgba_background_color, significant_bits)

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB; to be asked for once. MediaError for a broken or truncated image."""
        try:
            return np.asarray(pil_to_rgb(self.file, self.background, self.significant_bits))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - broken data makes decoders raise anything
            raise MediaError(
                f"the {self.file.format} image of {self.width}x{self.height} pixels is broken or truncated"
            ) from None
        finally:
            self.file.close()  # else it would keep what it decoded until the whole prompt is done


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """A JPEG that libjpeg-turbo decodes to the same bits as Pillow, in less than half the time."""

    height: int
    width: int
    data: bytes

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB. MediaError for a broken or truncated image."""
        try:
            rgb: Pixels = simplejpeg.decode_jpeg(self.data, "RGB", strict=True)
        except ValueError:  # an irregular one: Pillow is the judge of it; its pixels were counted as it was opened
            return EncodedImage.open(self.data).decode()
        return rgb


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """Pixels handed in, behind the face of an EncodedImage."""

    pixels: Pixels

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB."""
        return self.pixels


def open_image(data: Data) -> PlainJpeg | Anymap | EncodedImage | DecodedImage:
    """Tell the height and width of `data` now, and its pixels when asked for. MediaError, LimitExceeded."""
    assert not isinstance(data, tuple), "frames are a video's"
    if not isinstance(data, bytes):
        check_pixels(data.shape[1], data.shape[0])
        return DecodedImage(data)
    if ANYMAP_START.match(data):
        return Anymap.open(data)
    if (size := _plain_jpeg_size(data)) is None:
        return EncodedImage.open(data)
    add_picture(size[1], size[0])
    check_scans(data, size[1], size[0], up_to_end=True)
    return PlainJpeg(*size, data)


def _open_file(data: bytes) -> Image.Image:
    """What Pillow knows by the header, after what it may make a decoder do was checked. Raises anything."""
    check_parts(data)
    codestream = check_boxes(data)
    file = Image.open(io.BytesIO(data), formats=_FORMATS_OF_PILLOW)
    if codestream not in {None, file.size}:
        raise ValueError("its box and its codestream state different sizes")
    return file


def _beyond_pillows_limit() -> LimitExceeded:
    """Pillow warns at its limit, and raises at twice it. A program that uses this one may have set another."""
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    if limit == MAX_IMAGE_PIXELS:
        return LimitExceeded(f"the image has more than {MAX_IMAGE_PIXELS} pixels, the limit")
    return LimitExceeded(
        f"the image has more pixels than Pillow takes in this process, where PIL.Image.MAX_IMAGE_PIXELS is "
        f"{Image.MAX_IMAGE_PIXELS}"
    )


def _has_exif(file: Image.Image, data: bytes) -> bool:
    """Whether asking Pillow for the orientation is worth it: of a PNG it would decode every pixel first, to be sure."""
    return file.format != "PNG" or b"eXIf" in data or b"XML:com.adobe.xmp" in data or b"Raw profile type" in data


def resize(rgb: Pixels, height: int, width: int, resample: Resample = "bicubic") -> Pixels:
    """uint8 [..., H, W, 3] -> uint8 [..., height, width, 3], antialiased; an unchanged size is not resized.

    The arithmetic is torch's on uint8, which is what torchvision's `resize` runs.
    """
    if rgb.shape[-3:-1] == (height, width):
        return rgb
    frames = from_dlpack(rgb.reshape(-1, *rgb.shape[-3:]))  # torch.from_numpy warns of arrays that are read-only
    # These strides are those of channels_last, for which torch has a path twice as fast.
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), size=(height, width), mode=resample, align_corners=False, antialias=True
    )
    array: Pixels = resized.permute(0, 2, 3, 1).numpy()
    return array.reshape(*rgb.shape[:-3], height, width, 3)


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in grays or RGB whose header names no orientation; None for anything else."""
    if not data.startswith(JPEG_START):
        return None
    header = data[: jpeg_head(data)]
    if b"Exif\0" in header or b"tiff:Orientation" in header:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):  # it has no name for the subsampling 4:4:1
        return None
    return (height, width) if colours in {"Gray", "YCbCr", "RGB"} else None
