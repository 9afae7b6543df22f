"""Decoding and resizing of images: RGB as transformers' `load_image` and its torchvision backend make it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mindie_mm.config import MAX_IMAGE_PIXELS
from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.caps import caps

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded, told by content."""
MAX_SCAN_PIXELS = 2**32
"""Most pixels of a JPEG times its scans: a scan of a few bytes costs a pass over all of them."""

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3] of an image, [frames, height, width, 3] of a video; RGB."""
Data = bytes | NDArray[Any]
"""What preprocessing starts from: encoded bytes, or pixels, or samples of sound."""

Resample = Literal["bilinear", "bicubic", "lanczos"]
RESAMPLES: Mapping[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""By the number under which Pillow, and so a preprocessor's configuration, knows them."""

_ORIENTATION_TAG = 0x0112
_START_OF_SCAN = b"\xff\xda"
_END_OF_IMAGE = b"\xff\xd9"
_JPEG_START = b"\xff\xd8\xff"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in a scan's data, these alone are no data
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image whose header was read, and checked against the caps, but that is not decoded yet."""

    height: int
    """Pixels, upright: after the EXIF orientation."""
    width: int
    file: Image.Image

    @classmethod
    def open(cls, data: bytes) -> EncodedImage:
        """Reads the header of `data`. MediaError for what is no image, LimitExceeded."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                file = Image.open(io.BytesIO(data), formats=FORMATS)
                width, height = file.size
                _check_pixels(width, height)
                if data.startswith(_JPEG_START):  # whatever Pillow calls it: of several pictures, it is an MPO
                    _check_scans(data, width * height)
                orientation = file.getexif().get(_ORIENTATION_TAG, 1) if _has_exif(file, data) else 1
        except Image.DecompressionBombError:
            raise LimitExceeded(f"the image has more than {MAX_IMAGE_PIXELS} pixels") from None
        except (LimitExceeded, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - a hostile header makes decoders raise anything
            raise MediaError(f"the {len(data)} bytes are no readable image ({', '.join(FORMATS)})") from None
        if orientation in {5, 6, 7, 8} and file.format != "TIFF":  # of a TIFF Pillow gives the upright size
            width, height = height, width
        return cls(height, width, file)

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB. MediaError for a broken or truncated image."""
        try:
            return np.asarray(pil_to_rgb(self.file))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - broken data makes decoders raise anything
            raise MediaError(
                f"the {self.file.format} image of {self.width}x{self.height} pixels is broken or truncated"
            ) from None


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


def open_image(data: Data) -> PlainJpeg | EncodedImage | DecodedImage:
    """Height and width of `data` now, its pixels when asked for. MediaError, LimitExceeded."""
    if not isinstance(data, bytes):
        _check_pixels(data.shape[1], data.shape[0])
        return DecodedImage(data)
    if (size := _plain_jpeg_size(data)) is None:
        return EncodedImage.open(data)
    _check_pixels(size[1], size[0])
    _check_scans(data, size[0] * size[1])
    return PlainJpeg(*size, data)


def _has_exif(file: Image.Image, data: bytes) -> bool:
    """Whether asking Pillow for the orientation is worth it: of a PNG it would decode every pixel first, to be sure."""
    return file.format != "PNG" or b"eXIf" in data or b"XML:com.adobe.xmp" in data or b"Raw profile type" in data


def pil_to_rgb(image: Image.Image) -> Image.Image:
    """`image` upright and as RGB, as `transformers.image_utils.load_image` does it.

    The exception is 16-bit grayscale, which is scaled to 8 bits; Pillow would clip it to white.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = ImageOps.exif_transpose(image)
        if image.mode in _SIXTEEN_BIT_MODES:
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")


def resize(rgb: Pixels, height: int, width: int, resample: Resample = "bicubic") -> Pixels:
    """uint8 [..., H, W, 3] -> uint8 [..., height, width, 3], antialiased; an unchanged size is not resized.

    The arithmetic is torch's on uint8, which is what torchvision's `resize` runs.
    """
    if rgb.shape[-3:-1] == (height, width):
        return rgb
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only arrays; this one is only read
        frames = torch.from_numpy(rgb.reshape(-1, *rgb.shape[-3:]))
    # These strides are those of channels_last, for which torch has a path twice as fast.
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), size=(height, width), mode=resample, align_corners=False, antialias=True
    )
    array: Pixels = resized.permute(0, 2, 3, 1).numpy()
    return array.reshape(*rgb.shape[:-3], height, width, 3)


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in grays or RGB whose header names no orientation; None for anything else."""
    place = 2
    while data[place : place + 2] != _START_OF_SCAN:
        if data[place : place + 1] != b"\xff":  # the end of the data among others
            return None
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
    header = data[:place]
    if not header.startswith(_JPEG_START) or b"Exif\0" in header or b"tiff:Orientation" in header:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if colours in {"Gray", "YCbCr", "RGB"} else None


def _check_scans(data: bytes, num_pixels: int) -> None:
    """LimitExceeded for a JPEG of more scans than its size allows.

    Bytes that only look like a scan's start are sorted out where there are many.
    """
    if data.count(_START_OF_SCAN) * num_pixels <= MAX_SCAN_PIXELS:
        return
    place, num_scans = 2, 0
    while (marker := _JPEG_MARKER.match(data, place)) is not None and marker[0] != _END_OF_IMAGE:
        num_scans += marker[0] == _START_OF_SCAN
        if num_scans * num_pixels > MAX_SCAN_PIXELS:
            raise LimitExceeded(
                f"the JPEG has {num_pixels} pixels in more than {MAX_SCAN_PIXELS // num_pixels} scans, the limit"
            )
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
        if marker[0] == _START_OF_SCAN:
            following = _JPEG_MARKER.search(data, place)
            place = following.start() if following else len(data)


def _check_pixels(width: int, height: int) -> None:
    max_pixels = caps().max_image_pixels
    if width * height > max_pixels:
        raise LimitExceeded(f"the image has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")
