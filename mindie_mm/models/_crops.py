"""Overlapping square crops of images, as Molmo and Molmo 2 use them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.media.image.encoded_image import Pixels


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of square crops, patches and windows. A window is a group of patches that are pooled to one feature."""

    side: int
    """Side of a crop in pixels."""
    patch: int
    """Side of a patch in pixels."""
    pooling: tuple[int, int]
    """Size of a window in patches (rows, columns)."""
    margins: tuple[int, int] = (0, 0)
    """Number of patches at the start and at the end of each axis of a crop that belong to the neighboring crop."""

    @property
    def patches(self) -> int:
        """Number of patches along a side of a crop."""
        return self.side // self.patch

    @property
    def step(self) -> int:
        """Distance between the starts of two neighboring crops, in pixels."""
        return (self.patches - sum(self.margins)) * self.patch

    @property
    def shared(self) -> int:
        """Number of pixels along a side of a crop that are in its margins."""
        return sum(self.margins) * self.patch

    @property
    def square_cells(self) -> tuple[int, int]:
        """Number of windows of one crop (rows, columns)."""
        return self._cells(self.patches, self.patches)

    def canvas(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width in pixels of the canvas for `rows` x `columns` crops."""
        return rows * self.step + self.shared, columns * self.step + self.shared

    def cells(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of windows (rows, columns) on the canvas of `rows` x `columns` crops."""
        height, width = self.canvas(rows, columns)
        return self._cells(height // self.patch, width // self.patch)

    def _cells(self, height: int, width: int) -> tuple[int, int]:
        return math.ceil(height / self.pooling[0]), math.ceil(width / self.pooling[1])

    def square_windows(self) -> Tensor:
        """Return the patches of each window of one crop, int64 [windows, patches of a window].

        The value is -1 where a window extends beyond the crop.
        """
        return self._windows(torch.arange(self.patches**2).view(self.patches, self.patches))

    def canvas_windows(self, rows: int, columns: int) -> Tensor:
        """Return the patches of each window on the canvas of `rows` x `columns` crops.

        The result has the same form as in `square_windows`. Patches are numbered crop after crop.
        """
        (row, y), (column, x) = self._owners(rows), self._owners(columns)
        crop = row.unsqueeze(1) * columns + column
        return self._windows(crop * self.patches**2 + y.unsqueeze(1) * self.patches + x)

    def _owners(self, crops: int) -> tuple[Tensor, Tensor]:
        """Return the crop of each patch along one axis of a canvas, and the index of the patch in that crop."""
        window, before = self.step // self.patch, self.margins[0]
        patches = torch.arange(crops * window + sum(self.margins))
        crop = ((patches - before) // window).clamp(0, crops - 1)
        return crop, patches - crop * window

    def _windows(self, patches: Tensor) -> Tensor:
        high, wide = self.pooling
        rows, columns = self._cells(*patches.shape)
        below, right = rows * high - patches.shape[0], columns * wide - patches.shape[1]
        edges = (right // 2, (right + 1) // 2, below // 2, (below + 1) // 2)
        padded = F.pad(patches, edges, value=-1).view(rows, high, columns, wide)
        return padded.transpose(1, 2).reshape(rows * columns, high * wide)


@dataclass(frozen=True, slots=True)
class Canvas:
    """A larger area with an image in its center and zeros around the image."""

    height: int
    """Height of the canvas in pixels."""
    width: int
    """Width of the canvas in pixels."""
    rows: int
    """Height of the image in pixels."""
    columns: int
    """Width of the image in pixels."""

    @classmethod
    def fitting(cls, image_height: int, image_width: int, height: int, width: int) -> Self:
        """Return the canvas on which the image is as large as its proportions allow.

        The size is computed in float32 as in the reference, because other rounding could change the size by a pixel.
        """
        image = np.array([image_height, image_width], np.float32)
        scale = (np.array([height, width], np.float32) / image).min()
        rows, columns = (image * scale).astype(int).tolist()
        return cls(height, width, max(rows, 1), max(columns, 1))

    @property
    def top(self) -> int:
        """Number of pixel rows above the image."""
        return (self.height - self.rows) // 2

    @property
    def left(self) -> int:
        """Number of pixel columns to the left of the image."""
        return (self.width - self.columns) // 2

    def resize(self, rgb: Pixels, out: NDArray[np.float32]) -> None:
        """Resize uint8 [H, W, 3] into `out`, float32 [rows, columns, 3] in [0, 1].

        The resize is bilinear with antialiasing, and the result is not rounded to bytes.
        """
        # The batch axis is added first, which gives the strides of channels_last. With other strides, torch's kernel is
        # wrong for a result that is one pixel wide.
        values = torch.from_numpy(np.asarray(rgb, np.float32)).div_(255).unsqueeze(0).permute(0, 3, 1, 2)
        size = (self.rows, self.columns)
        resized = F.interpolate(values, size, mode="bilinear", align_corners=False, antialias=True)
        np.clip(resized[0].permute(1, 2, 0).numpy(), 0, 1, out=out)

    def draw(self, image: Tensor) -> Tensor:
        """Pad an image [rows, columns, channels] to the canvas [height, width, channels]."""
        right, bottom = self.width - self.columns - self.left, self.height - self.rows - self.top
        return F.pad(image, (0, 0, self.left, right, self.top, bottom))

    def mask(self) -> Tensor:
        """Return a mask, float32 [height, width, 1], that is 1 on the image and 0 around the image."""
        return self.draw(torch.ones(self.rows, self.columns, 1))


def choose_tiling(height: int, width: int, tile: int, max_tiles: int) -> tuple[int, int]:
    """Choose the number of tiles (rows, columns) for an image.

    The result is the tiling that enlarges the image the least without shrinking it. If all tilings shrink the image,
    the result is the tiling that shrinks it the least.

    Args:
        height: Height of the image in pixels, without the margins of its crops. May be zero or negative.
        width: Width of the image in pixels, also without the margins.
        tile: Side of a tile in pixels.
        max_tiles: Maximum number of tiles.

    """
    tilings = _tilings(max_tiles)
    with np.errstate(divide="ignore"):
        # Use float32 as in both references, because rounding decides ties.
        scales = (tilings * tile).astype(np.float32) / np.array([height, width], np.float32)
    scale = scales.min(axis=1)
    best = scale.argmax() if (scale < 1).all() else np.where(scale < 1, np.float32(10e9), scale).argmin()
    rows, columns = tilings[best].tolist()
    return rows, columns


def only_tiling(max_tiles: int, fits: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """Return the tiling (rows, columns) that fits. Return None if no tiling or more than one fits."""
    fitting = [(rows, columns) for rows, columns in _tilings(max_tiles).tolist() if fits(rows, columns)]
    return fitting[0] if len(fitting) == 1 else None


@cache
def _tilings(max_tiles: int) -> NDArray[np.int64]:
    """Return all tilings (rows, columns), int64 [n, 2], sorted by number of tiles and then by rows."""
    sides = range(1, max_tiles + 1)
    pairs = [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]
    return np.array(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0])), np.int64)


def cut_crops(image: Tensor, crop: int, step: int) -> Tensor:
    """Cut [H, W, channels] into crops [n, crop, crop, channels], one every `step` pixels, row by row."""
    crops: Tensor = image.unfold(0, crop, step).unfold(1, crop, step)  # [rows, columns, channels, crop, crop]
    return crops.permute(0, 1, 3, 4, 2).flatten(0, 1)


def cut_patches(crops: Tensor, patch: int) -> Tensor:
    """Cut [n, H, W, channels] into flat patches [n, patches, patch * patch * channels].

    Patches are in row-major order. Channels vary fastest.
    """
    rows, columns = crops.shape[1] // patch, crops.shape[2] // patch
    patches: Tensor = crops.view(len(crops), rows, patch, columns, patch, -1).transpose(2, 3)
    return patches.reshape(len(crops), rows * columns, -1)
