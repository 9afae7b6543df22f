"""Decoding and resizing of images, like `load_image` and the torchvision backend of transformers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.dlpack import from_dlpack

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.document.pdf import PdfPage, open_page
from mindie_mm.media.document.tiff import TiffPage, image_of_tiff, is_tiff
from mindie_mm.media.guard.boxes import check_boxes
from mindie_mm.media.guard.caps import add_image, caps, check_pixels, work
from mindie_mm.media.guard.segments import JPEG_START, MAX_SCANS, PNG_START, check_parts, check_scans, jpeg_head
from mindie_mm.media.image.anymap import ANYMAP_START, Anymap
from mindie_mm.media.image.colours import (
    ORIENTATION_TAG,
    mend_byte_order,
    mend_transparency,
    orientation_of,
    pil_to_rgb,
    significant_bits_of,
    states_orientation_in_tiff,
)
from mindie_mm.media.image.heic import HeicImage
from mindie_mm.media.image.heif_boxes import is_heif
from mindie_mm.media.image.icons import ICON_START, image_of_icon
from mindie_mm.media.image.png_chunks import with_tidy_chunks
from mindie_mm.settings.config import MAX_IMAGE_PIXELS, Colour
from mindie_mm.settings.environment import limit_jpeg_scans_in_tiffs

limit_jpeg_scans_in_tiffs(MAX_SCANS)  # each strip of a TIFF may be a JPEG

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC", "JPEG2000", "ICO", "PPM")
"""Supported formats, detected by content.

Pillow can read more formats. Some of its decoders are written in Python, and take minutes for a few megabytes. Some
formats cannot be detected by content.
"""
_FORMATS_OF_PILLOW = tuple(name for name in FORMATS if name not in {"HEIC", "PPM"})

Pixels = NDArray[np.uint8]
"""RGB pixels, uint8 [height, width, 3] for an image and [frames, height, width, 3] for a video."""
Frames = tuple[bytes | Pixels, ...]
"""Frames of a video, each as an encoded image or as pixels."""
Data = bytes | NDArray[Any] | Frames | DocumentPage
"""Input of preprocessing: encoded bytes, pixels, audio samples, frames of a video, or a page of a document."""

Resample = Literal["bilinear", "bicubic", "lanczos"]
RESAMPLES: Mapping[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Resampling filters by their number in Pillow. Preprocessor configurations use the same numbers."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image whose header has been read and checked against the limits. The pixels are not decoded yet."""

    height: int
    """Height in pixels after the EXIF orientation is applied."""
    width: int
    """Width in pixels after the EXIF orientation is applied."""
    file: Image.Image
    background: Colour | None
    """Color behind transparent pixels. None means that the alpha channel is dropped."""
    significant_bits: int | None = None
    """Number of significant bits of 16-bit grayscale samples, if a PNG states it."""
    is_negative: bool = False
    """True if 0 is white in `file`, although its header says that 0 is black."""

    @classmethod
    def open(cls, data: bytes | TiffPage, *, drop_alpha: bool = False) -> EncodedImage:
        """Read the header of `data`. `drop_alpha` has the same meaning as in `open_image`.

        Raises:
            MediaError: The data are not a readable image, or are a TIFF with several pages.
            LimitExceeded: The image exceeds a limit.

        """
        is_negative = False
        if isinstance(data, TiffPage) or is_tiff(data):
            tiff = data.image() if isinstance(data, TiffPage) else image_of_tiff(data)
            data, is_negative = tiff.data, tiff.is_negative
        num_bytes = len(data)
        try:
            if data.startswith(ICON_START):
                data = image_of_icon(data)
            if data.startswith(PNG_START):
                data = with_tidy_chunks(data)
            file = _open_file(data)
            width, height = file.size
            add_image(width, height)
            if data.startswith(JPEG_START):  # `file.format` is MPO for a JPEG with several images
                check_scans(data, width, height, up_to_end=True)
            work().is_rgb &= file.mode == "RGB"
            mend_transparency(file)
            mend_byte_order(file)
            orientation = _orientation(file)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _beyond_pillows_limit() from None
        except (LimitExceeded, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - for a hostile header, a decoder may raise any exception
            raise MediaError(
                f"the {num_bytes} bytes cannot be read as an image (supported formats: {', '.join(FORMATS)})"
            ) from None
        # Pillow reports the upright size if a TIFF tag states the orientation, but not if XMP does.
        if orientation in {5, 6, 7, 8} and not states_orientation_in_tiff(file):
            width, height = height, width
        significant_bits = significant_bits_of(data) if data.startswith(PNG_START) else None
        background = None if drop_alpha else caps().rgba_background_color
        return cls(height, width, file, background, significant_bits, is_negative)

    def decode(self) -> Pixels:
        """Return RGB pixels, uint8 [height, width, 3]. Call this method only once.

        Raises:
            MediaError: The image is broken or truncated, or has another size than its header states.

        """
        try:
            rgb = np.asarray(pil_to_rgb(self.file, self.background, self.significant_bits, negative=self.is_negative))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - for broken data, a decoder may raise any exception
            raise MediaError(
                f"the {self.file.format} image of {self.width}x{self.height} pixels is broken or truncated"
            ) from None
        finally:
            self.file.close()  # otherwise, the file keeps its decoded pixels until the whole prompt is processed
        height, width, _ = rgb.shape
        if (height, width) != (self.height, self.width):  # a prompt was planned, and perhaps rendered, with its size
            raise MediaError(
                f"the header of the {self.file.format} image states {self.width}x{self.height} pixels, but "
                f"{width}x{height} pixels were decoded"
            )
        return rgb


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """A JPEG that libjpeg-turbo decodes to the same bits as Pillow, in less than half the time."""

    height: int
    width: int
    data: bytes

    def decode(self) -> Pixels:
        """Return RGB pixels, uint8 [height, width, 3]. Raise MediaError if the image is broken or truncated."""
        try:
            rgb: Pixels = simplejpeg.decode_jpeg(self.data, "RGB", strict=True)
        except ValueError:  # Pillow may accept an irregular file; `open_image` has counted the pixels already
            return EncodedImage.open(self.data).decode()
        return rgb


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """Pixels that the caller supplies, with the same interface as an EncodedImage."""

    pixels: Pixels

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    def decode(self) -> Pixels:
        """Return RGB pixels, uint8 [height, width, 3]."""
        return self.pixels


Opened = PlainJpeg | Anymap | HeicImage | EncodedImage | DecodedImage | PdfPage


def open_image(data: Data, *, drop_alpha: bool = False) -> Opened:
    """Read the size of an image. Call `decode` on the result to decode the pixels.

    Args:
        data: An encoded image, pixels as uint8 [height, width, 3], or a page of a document.
        drop_alpha: Whether transparent pixels keep the colors that they have in the file. If False, they show the
            background.

    Raises:
        MediaError: The data are not a readable image.
        LimitExceeded: The image exceeds a limit.

    """
    assert not isinstance(data, tuple), "frames are a video's"
    if isinstance(data, PdfPage):
        return open_page(data)
    if isinstance(data, TiffPage):
        return EncodedImage.open(data, drop_alpha=drop_alpha)
    if not isinstance(data, bytes):
        check_pixels(data.shape[1], data.shape[0])
        return DecodedImage(data)
    return _open_bytes(data, drop_alpha=drop_alpha)


def _open_bytes(data: bytes, *, drop_alpha: bool) -> PlainJpeg | Anymap | HeicImage | EncodedImage:
    if ANYMAP_START.match(data):
        return Anymap.open(data)
    if is_heif(data) and (heic := HeicImage.open(data, drop_alpha=drop_alpha)) is not None:
        return heic
    if (size := _plain_jpeg(data)) is None:
        return EncodedImage.open(data, drop_alpha=drop_alpha)
    height, width, is_gray = size
    add_image(width, height)
    check_scans(data, width, height, up_to_end=True)
    work().is_rgb &= not is_gray
    return PlainJpeg(height, width, data)


def _open_file(data: bytes) -> Image.Image:
    """Check the limits of the format, then open the file with Pillow. This may raise any exception."""
    check_parts(data)
    codestream = check_boxes(data)
    file = Image.open(io.BytesIO(data), formats=_FORMATS_OF_PILLOW)
    if codestream not in {None, file.size}:
        raise ValueError("the size in the box differs from the size in the codestream")
    return file


def _beyond_pillows_limit() -> LimitExceeded:
    """Return the error for an image above Pillow's limit.

    Pillow warns about images above its limit, and raises an error for images above twice this limit. The program that
    uses this package may have changed the limit.
    """
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    if limit == MAX_IMAGE_PIXELS:
        return LimitExceeded(f"the image has more pixels than the limit of {MAX_IMAGE_PIXELS}")
    return LimitExceeded(
        f"the image has more pixels than Pillow accepts in this process (PIL.Image.MAX_IMAGE_PIXELS is "
        f"{Image.MAX_IMAGE_PIXELS})"
    )


def _orientation(file: Image.Image) -> Any:
    """Return the EXIF orientation of a file, or 1 if it has none."""
    if file.format != "PNG":
        return orientation_of(file)
    # PngImageFile's `getexif` would decode the image. `with_tidy_chunks` has moved the orientation in front.
    return Image.Image.getexif(file).get(ORIENTATION_TAG, 1)


def resize(rgb: Pixels, height: int, width: int, resample: Resample = "bicubic") -> Pixels:
    """Resize uint8 [..., H, W, 3] to uint8 [..., height, width, 3] with antialiasing.

    If the size is already right, return `rgb` itself. torch computes the result in uint8, as in torchvision's `resize`.
    """
    if rgb.shape[-3:-1] == (height, width):
        return rgb
    frames = from_dlpack(rgb.reshape(-1, *rgb.shape[-3:]))  # torch.from_numpy warns about read-only arrays
    # The strides are those of the channels_last memory format, for which torch has a kernel that is twice as fast.
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), size=(height, width), mode=resample, align_corners=False, antialias=True
    )
    array: Pixels = resized.permute(0, 2, 3, 1).numpy()
    return array.reshape(*rgb.shape[:-3], height, width, 3)


def _plain_jpeg(data: bytes) -> tuple[int, int, bool] | None:
    """Return the height and width of a JPEG without an orientation, and whether it is gray.

    Return None for CMYK and for other data.
    """
    if not data.startswith(JPEG_START):
        return None
    header = data[: jpeg_head(data)]
    if b"Exif\0" in header or b"tiff:Orientation" in header:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):  # simplejpeg has no name for 4:4:1 subsampling
        return None
    return (height, width, colours == "Gray") if colours in {"Gray", "YCbCr", "RGB"} else None
