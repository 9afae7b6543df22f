"""Crops of MiniCPM-V 4.6: a thumbnail of an image, and slices of a larger version if the image has many pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np

from mindie_mm.media.image.encoded_image import Pixels, Resample, resize
from mindie_mm.media.image.patches import patchify
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.models._qwen_pixels import MAX_ASPECT_RATIO

WINDOW = 2
"""Side in patches of the windows that the tower merges, and of the squares that the projector then merges."""


@dataclass(frozen=True, slots=True)
class Crops:
    """The crops of an image or of each frame of a video: a thumbnail, then `rows` x `columns` slices of one size."""

    rows: int
    columns: int
    thumbnail: tuple[int, int]
    """Height and width of the thumbnail in patches."""
    slice: tuple[int, int]
    """Height and width of a slice in patches, or zeros if there are no slices."""

    @classmethod
    def of(cls, grid: Sequence[int]) -> Self:
        """Return the crops of an item with the grid (frames, rows, columns, height, width, height, width)."""
        return cls(grid[1], grid[2], (grid[3], grid[4]), (grid[5], grid[6]))

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.rows, self.columns, *self.thumbnail, *self.slice)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each crop in patches."""
        return [self.thumbnail, *[self.slice] * (self.rows * self.columns)]

    @property
    def num_patches(self) -> int:
        return sum(height * width for height, width in self.sizes)


@dataclass(frozen=True, slots=True)
class Slicing:
    """Settings for images or for videos."""

    side: int
    """Side in pixels of a square with as many pixels as a crop should have."""
    patch: int
    max_slices: int
    """Maximum number of slices. No image is cut if it is 1."""
    merge: int
    """Number of patches along each side that become one token."""
    resample: Resample
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @classmethod
    def read(cls, config: Mapping[str, Any], mode: str, where: str) -> Self:
        """Read the settings.

        `mode` is the downsample_mode of the model. Raise UnsupportedCheckpoint if the settings are not supported.
        """
        needed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "downsample_mode": mode}
        check_settings(config, {**needed, "stack_frames": 1, "do_sample_frames": True}, where)
        return cls(
            side=config["scale_resolution"],
            patch=config["patch_size"],
            max_slices=config["max_slice_nums"] if config["slice_mode"] else 1,
            merge=WINDOW if mode == "4x" else WINDOW**2,
            resample=resample_of(config, where),
            mean=tuple(config["image_mean"]),
            std=tuple(config["image_std"]),
            rescale_factor=config["rescale_factor"],
        )

    @property
    def group(self) -> int:
        """Side in patches of the squares whose patches are adjacent in a block."""
        return self.merge // WINDOW

    def crops(self, height: int, width: int) -> Crops:
        """Return the crops of an image of `height` x `width` pixels."""
        rows, columns = self._slices(height, width)
        thumbnail = self._fit(height, width, enlarges=not rows)
        if not rows:
            return Crops(0, 0, thumbnail, (0, 0))
        # As in the reference, the size of a slice is computed from that of an image that can be cut evenly.
        part = _multiple(height, rows) / rows, _multiple(width, columns) / columns
        return Crops(rows, columns, thumbnail, self._fit(*part, enlarges=True))

    def _slices(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of slices, or zeros if the image is not cut."""
        count = min(math.ceil(width * height / (self.side * self.side)), self.max_slices)
        if count <= 1:
            return 0, 0
        best, least, ratio = (1, 1), math.inf, math.log(width / height)
        for number in (count - 1, count, count + 1):
            if number == 1 or number > self.max_slices:
                continue
            for rows in (rows for rows in range(1, number + 1) if number % rows == 0):
                error = abs(ratio - math.log(number // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, number // rows), error
        return best

    def _fit(self, height: float, width: float, *, enlarges: bool) -> tuple[int, int]:
        """Return the height and width in patches of a crop that shows an image, or a part of an image, of this size."""
        if enlarges or height * width > self.side * self.side:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        unit = self.patch * self.merge
        return _multiple(height, unit) // self.patch, _multiple(width, unit) // self.patch

    def write(self, rgb: Pixels, crops: Crops, out: np.ndarray[Any, Any]) -> None:
        """Write the patches of all crops of an image into `out`, uint8 [patches, patch * patch * 3]."""
        patches, start = out.reshape(len(out), self.patch, self.patch, 3), 0
        for crop in self._cut(rgb, crops):
            stop = start + crop.shape[0] * crop.shape[1] // self.patch**2
            patchify(crop, patches[start:stop], self.patch, self.group)
            start = stop

    def _cut(self, rgb: Pixels, crops: Crops) -> Iterator[Pixels]:
        height, width = (side * self.patch for side in crops.thumbnail)
        yield resize(rgb, height, width, self.resample)
        if crops.rows:
            height, width = (side * self.patch for side in crops.slice)
            larger = resize(rgb, height * crops.rows, width * crops.columns, self.resample)
            for row in range(crops.rows):
                for column in range(crops.columns):
                    yield larger[row * height : (row + 1) * height, column * width : (column + 1) * width]


def _multiple(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)


@cache
def largest(settings: Slicing) -> tuple[int, int]:
    """Return the height and width in pixels of an image with the most patches, or nearly the most."""
    ratios = np.geomspace(1, MAX_ASPECT_RATIO, 60).tolist()
    areas = [count * settings.side**2 for count in range(1, settings.max_slices + 1)]
    sizes = [(max(1, int(math.sqrt(area / ratio))), int(math.sqrt(area * ratio))) for area in areas for ratio in ratios]
    sizes = [(short, min(long, short * MAX_ASPECT_RATIO)) for short, long in sizes]
    return max([*sizes, *(size[::-1] for size in sizes)], key=lambda size: settings.crops(*size).num_patches)
