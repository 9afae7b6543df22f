"""The steps of transformers' image processors before normalization, as preprocessor_config.json configures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.media.image.encoded_image import RESAMPLES, Pixels, Resample, resize
from mindie_mm.settings.config import MAX_IMAGE_PIXELS

Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Size:
    """Target size for resizing: a fixed height and width, or the length of the shorter side."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    """Maximum length of the longer side. Only allowed with `shortest_edge`."""

    @classmethod
    def read(cls, value: Any, where: str, *, square: bool = False) -> Self:
        """Read a `size` or `crop_size` of a configuration.

        Args:
            value: The value in the configuration.
            where: Name of the configuration in error messages.
            square: Whether a single number is the length of both sides. If False, it is the length of the shorter side.

        Raises:
            UnsupportedCheckpoint: The value has an unsupported format.

        """
        if isinstance(value, int):
            return cls(value, value) if square else cls(shortest_edge=value)
        if isinstance(value, Mapping):
            edges = {name: int(edge) for name, edge in value.items() if edge is not None}
            if edges.keys() in ({"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"}):
                return cls(**edges)
        raise UnsupportedCheckpoint(
            f"{where}: size and crop_size must have height and width, or shortest_edge and optionally longest_edge; "
            f"one of them is {value!r}"
        )

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Height and width of every resized image, or None if they depend on the image."""
        return None if self.height is None or self.width is None else (self.height, self.width)

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the new height and width of an image of `height` and `width`."""
        if self.fixed is not None:
            return self.fixed
        assert self.shortest_edge is not None
        short: float = self.shortest_edge
        if self.longest_edge is not None and max(height, width) / min(height, width) * short > self.longest_edge:
            short = self.longest_edge * min(height, width) / max(height, width)
        if min(height, width) == round(short):
            return height, width
        # The reference rounds the shorter side, but computes the longer side from the unrounded value.
        long = int(short * max(height, width) / min(height, width))
        return (long, round(short)) if width < height else (round(short), long)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Padding to a square, resizing and center cropping, in this order. Each step is optional."""

    size: Size | None
    """Size of resized images. None means no resizing."""
    resample: Resample
    crop: tuple[int, int] | None = None
    """Height and width of the center crop in pixels. None means no cropping."""
    background: Color | None = None
    """Color of the padding to a square. None means no padding."""

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of every preprocessed image, or None if they depend on the image."""
        if self.crop is not None or self.size is None:
            return self.crop
        return self.size.of(1, 1) if self.background is not None else self.size.fixed

    def check(self, height: int, width: int) -> None:
        """Raise LimitExceeded if an image of this size would be resized to more than `MAX_IMAGE_PIXELS`."""
        if self.size is None:
            return
        side = max(height, width)
        new_height, new_width = self.size.of(side, side) if self.background is not None else self.size.of(height, width)
        if new_height * new_width > MAX_IMAGE_PIXELS:
            raise LimitExceeded(
                f"the image of {width}x{height} pixels would be resized to {new_width}x{new_height}; the limit "
                f"is {MAX_IMAGE_PIXELS} pixels"
            )

    def apply(self, rgb: Pixels) -> Pixels:
        """Apply all steps to an image, or to frames of the same size, uint8 [..., H, W, 3]."""
        if self.background is not None:
            rgb = pad_to_square(rgb, self.background)
        if self.size is not None:
            rgb = resize(rgb, *self.size.of(*rgb.shape[-3:-1]), self.resample)
        return rgb if self.crop is None else center_crop(rgb, *self.crop)


def pad_to_square(rgb: Pixels, background: Color) -> Pixels:
    """Pad uint8 [..., H, W, 3] to a square whose side is the longer side. The image is in the center of the square."""
    height, width = rgb.shape[-3:-1]
    side = max(height, width)
    return pad(rgb, side, side, background)


def pad(rgb: Pixels, height: int, width: int, background: Color = (0, 0, 0)) -> Pixels:
    """Pad uint8 [..., H, W, 3] to `height` and `width`, with the image in the center.

    If the number of padding pixels is odd, the image is one pixel nearer to the top or left.
    """
    if rgb.shape[-3:-1] == (height, width):
        return rgb
    top, left = (height - rgb.shape[-3]) // 2, (width - rgb.shape[-2]) // 2
    padded: Pixels = np.empty((*rgb.shape[:-3], height, width, 3), np.uint8)
    padded.reshape(*padded.shape[:-2], -1)[...] = np.tile(
        np.array(background, np.uint8), width
    )  # filled in whole rows, because copying 3 bytes at a time is slow
    padded[..., top : top + rgb.shape[-3], left : left + rgb.shape[-2], :] = rgb
    return padded


def center_crop(rgb: Pixels, height: int, width: int) -> Pixels:
    """Crop uint8 [..., H, W, 3] to its center, [..., height, width, 3]. Smaller images are padded with black."""
    rgb = pad(rgb, max(height, rgb.shape[-3]), max(width, rgb.shape[-2]))
    top, left = (rgb.shape[-3] - height) // 2, (rgb.shape[-2] - width) // 2
    return rgb[..., top : top + height, left : left + width, :]


def background_of(mean: Any) -> Color:
    """Return the color of the normalization mean. The reference processors pad images with this color."""
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def resample_of(config: Mapping[str, Any], where: str, name: str = "resample") -> Resample:
    """Return the resampling filter that a preprocessor configuration specifies under `name`, by its number.

    Raises:
        UnsupportedCheckpoint: The number is not in `RESAMPLES`.

    """
    if (number := config[name]) not in RESAMPLES:
        raise UnsupportedCheckpoint(f"{where}: {name} is {number!r}; only {[*RESAMPLES]} are supported")
    return RESAMPLES[number]


def check_output_size(output_size: tuple[int, int] | None, side: int, where: str) -> None:
    """Raise UnsupportedCheckpoint unless every preprocessed image is a square of `side` pixels, as the tower needs."""
    if output_size != (side, side):
        raise UnsupportedCheckpoint(
            f"{where}: images are resized to {output_size or 'several sizes'}, but the tower takes images of "
            f"{side}x{side} pixels"
        )


def check_settings(config: Mapping[str, Any], needed: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint if a value in a configuration differs from `needed`. Missing and null values pass."""
    for name, value in needed.items():
        if (configured := config.get(name)) is not None and configured != value:
            raise UnsupportedCheckpoint(f"{where}: {name} is {configured!r}; only {value!r} is supported")
