"""The steps of transformers' image processors up to the normalisation, as a preprocessor_config.json names them."""

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
    """What pictures are resized to: one height and width, or by their shorter side."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    """With `shortest_edge`: what the longer side is kept below."""

    @classmethod
    def read(cls, value: Any, where: str, *, square: bool = False) -> Self:
        """From a `size` or `crop_size`; of a number alone, both sides if `square`. UnsupportedCheckpoint."""
        if isinstance(value, int):
            return cls(value, value) if square else cls(shortest_edge=value)
        if isinstance(value, Mapping):
            edges = {name: int(edge) for name, edge in value.items() if edge is not None}
            if edges.keys() in ({"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"}):
                return cls(**edges)
        raise UnsupportedCheckpoint(
            f"{where}: a size is {value!r}, only height and width, or shortest_edge and perhaps longest_edge, is served"
        )

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Height and width of every picture, where that is known."""
        return None if self.height is None or self.width is None else (self.height, self.width)

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture of `height` and `width` is resized to."""
        if self.fixed is not None:
            return self.fixed
        assert self.shortest_edge is not None
        short: float = self.shortest_edge
        if self.longest_edge is not None and max(height, width) / min(height, width) * short > self.longest_edge:
            short = self.longest_edge * min(height, width) / max(height, width)
        if min(height, width) == round(short):
            return height, width
        # The reference rounds the shorter side, and takes the longer one of what it was before that.
        long = int(short * max(height, width) / min(height, width))
        return (long, round(short)) if width < height else (round(short), long)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Padding, resize and centre crop."""

    size: Size | None
    """The size that pictures are resized to; None: not resized."""
    resample: Resample
    crop: tuple[int, int] | None = None
    """Height and width that is cut from the middle; None: not cropped."""
    background: Color | None = None
    """What a picture is padded to a square with, before it is resized; None: not padded."""

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of every picture that is made, where all are of one size."""
        if self.crop is not None or self.size is None:
            return self.crop
        return self.size.of(1, 1) if self.background is not None else self.size.fixed

    def check(self, height: int, width: int) -> None:
        """LimitExceeded where a picture of `height` and `width` would be resized to an enormous one."""
        if self.size is None:
            return
        side = max(height, width)
        new_height, new_width = self.size.of(side, side) if self.background is not None else self.size.of(height, width)
        if new_height * new_width > MAX_IMAGE_PIXELS:
            raise LimitExceeded(
                f"{width}x{height} pixels would be resized to {new_width}x{new_height}; "
                f"the limit is {MAX_IMAGE_PIXELS} pixels"
            )

    def apply(self, rgb: Pixels) -> Pixels:
        """uint8 [..., H, W, 3] of a picture, or of frames of one size."""
        if self.background is not None:
            rgb = pad_to_square(rgb, self.background)
        if self.size is not None:
            rgb = resize(rgb, *self.size.of(*rgb.shape[-3:-1]), self.resample)
        return rgb if self.crop is None else center_crop(rgb, *self.crop)


def pad_to_square(rgb: Pixels, background: Color) -> Pixels:
    """uint8 [..., H, W, 3] in the middle of a square as wide as its longer side."""
    height, width = rgb.shape[-3:-1]
    side = max(height, width)
    return pad(rgb, side, side, background)


def pad(rgb: Pixels, height: int, width: int, background: Color = (0, 0, 0)) -> Pixels:
    """uint8 [..., H, W, 3] in the middle of a larger picture; where that is not whole, nearer to the top left."""
    if rgb.shape[-3:-1] == (height, width):
        return rgb
    top, left = (height - rgb.shape[-3]) // 2, (width - rgb.shape[-2]) // 2
    padded: Pixels = np.empty((*rgb.shape[:-3], height, width, 3), np.uint8)
    padded.reshape(*padded.shape[:-2], -1)[...] = np.tile(
        np.array(background, np.uint8), width
    )  # by rows: 3 at a time are slow
    padded[..., top : top + rgb.shape[-3], left : left + rgb.shape[-2], :] = rgb
    return padded


def center_crop(rgb: Pixels, height: int, width: int) -> Pixels:
    """uint8 [..., H, W, 3] -> [..., height, width, 3]: its middle; a picture smaller than that is padded in black."""
    rgb = pad(rgb, max(height, rgb.shape[-3]), max(width, rgb.shape[-2]))
    top, left = (rgb.shape[-3] - height) // 2, (rgb.shape[-2] - width) // 2
    return rgb[..., top : top + height, left : left + width, :]


def background_of(mean: Any) -> Color:
    """The colour that the mean of a normalisation stands for, what the reference's processors pad with."""
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def resample_of(config: Mapping[str, Any], where: str, name: str = "resample") -> Resample:
    """The filter that `name` of a preprocessor configuration numbers. UnsupportedCheckpoint."""
    if (number := config[name]) not in RESAMPLES:
        raise UnsupportedCheckpoint(f"{where}: {name} is {number!r}, only {[*RESAMPLES]} are served")
    return RESAMPLES[number]


def check_output_size(output_size: tuple[int, int] | None, side: int, where: str) -> None:
    """UnsupportedCheckpoint unless every picture that is made has the tower's `side`, in pixels, and is a square."""
    if output_size != (side, side):
        raise UnsupportedCheckpoint(
            f"{where}: images become {output_size or 'of several sizes'}, the tower takes {side} pixels a side"
        )


def check_settings(config: Mapping[str, Any], needed: Mapping[str, Any], where: str) -> None:
    """UnsupportedCheckpoint unless each of `needed` has that value in a configuration, or none; a null is none."""
    for name, value in needed.items():
        if (found := config.get(name)) is not None and found != value:
            raise UnsupportedCheckpoint(f"{where}: {name} is {found!r}, only {value!r} is served")
