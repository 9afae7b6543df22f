"""Pictures as overlapping square crops, as Molmo and its successor see them."""

from __future__ import annotations

import math
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
    """Squares of patches, and the windows of them that are pooled to one feature each."""

    side: int
    """Pixels of a square's side, and of a patch's."""
    patch: int
    pooling: tuple[int, int]
    """Rows and columns of patches of a window."""
    margins: tuple[int, int] = (0, 0)
    """Patches at a crop's start and end, on each axis, that are its neighbour's to give."""

    @property
    def patches(self) -> int:
        """Patches along a square's side."""
        return self.side // self.patch

    @property
    def step(self) -> int:
        """Pixels from one crop to the next."""
        return (self.patches - sum(self.margins)) * self.patch

    @property
    def shared(self) -> int:
        """Pixels of a side that are not its own."""
        return sum(self.margins) * self.patch

    @property
    def square_cells(self) -> tuple[int, int]:
        """Rows and columns of windows of one square."""
        return self._cells(self.patches, self.patches)

    def canvas(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width in pixels of what rows x columns crops are cut from."""
        return rows * self.step + self.shared, columns * self.step + self.shared

    def cells(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of windows of that canvas."""
        height, width = self.canvas(rows, columns)
        return self._cells(height // self.patch, width // self.patch)

    def _cells(self, height: int, width: int) -> tuple[int, int]:
        return math.ceil(height / self.pooling[0]), math.ceil(width / self.pooling[1])

    def square_windows(self) -> Tensor:
        """int64 [cells, patches of a window] of one square: the patches of each, -1 for none."""
        return self._windows(torch.arange(self.patches**2).view(self.patches, self.patches))

    def canvas_windows(self, rows: int, columns: int) -> Tensor:
        """The same of the canvas of rows x columns crops, whose patches come one crop after another."""
        (row, y), (column, x) = self._owners(rows), self._owners(columns)
        crop = row.unsqueeze(1) * columns + column
        return self._windows(crop * self.patches**2 + y.unsqueeze(1) * self.patches + x)

    def _owners(self, crops: int) -> tuple[Tensor, Tensor]:
        """For each patch along one axis of a canvas, the crop that gives it and its place in that crop."""
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
    """A picture in the middle of a canvas of `height` and `width` pixels, zero around it."""

    height: int
    width: int
    rows: int
    """Height of the picture, in pixels; `columns` is its width."""
    columns: int

    @classmethod
    def fitting(cls, image_height: int, image_width: int, height: int, width: int) -> Self:
        """The largest that keeps the image's proportions. In float32, as the reference: a row depends on it."""
        image = np.array([image_height, image_width], np.float32)
        scale = (np.array([height, width], np.float32) / image).min()
        rows, columns = (image * scale).astype(int).tolist()
        return cls(height, width, max(rows, 1), max(columns, 1))

    @property
    def top(self) -> int:
        """Rows above the picture."""
        return (self.height - self.rows) // 2

    @property
    def left(self) -> int:
        """Columns before the picture."""
        return (self.width - self.columns) // 2

    def resize(self, rgb: Pixels, out: NDArray[np.float32]) -> None:
        """uint8 [H, W, 3] -> the picture, `out` [rows, columns, 3] in [0, 1]: antialiased bilinear, never rounded."""
        values = torch.from_numpy(np.asarray(rgb, np.float32)).div_(255).permute(2, 0, 1).unsqueeze(0)
        size = (self.rows, self.columns)
        resized = F.interpolate(values, size, mode="bilinear", align_corners=False, antialias=True)
        np.clip(resized[0].permute(1, 2, 0).numpy(), 0, 1, out=out)

    def draw(self, picture: Tensor) -> Tensor:
        """[rows, columns, 3] -> [height, width, 3]."""
        right, bottom = self.width - self.columns - self.left, self.height - self.rows - self.top
        return F.pad(picture, (0, 0, self.left, right, self.top, bottom))

    def mask(self) -> Tensor:
        """float32 [height, width, 1]: 1 on the picture, 0 around it."""
        return self.draw(torch.ones(self.rows, self.columns, 1))


def choose_tiling(height: int, width: int, tile: int, max_tiles: int) -> tuple[int, int]:
    """Rows and columns of `tile` pixels for a picture of `height` and `width`, at most `max_tiles` together.

    The fewest to which it need not shrink; where it has to, those to which it shrinks the least. Sizes are what is
    left of a picture without the margins of its crops, and may so be zero or negative.
    """
    tilings = _tilings(max_tiles)
    with np.errstate(divide="ignore"):
        # In float32, as both references compute it: ties depend on it.
        scales = (tilings * tile).astype(np.float32) / np.array([height, width], np.float32)
    scale = scales.min(axis=1)
    best = scale.argmax() if (scale < 1).all() else np.where(scale < 1, np.float32(10e9), scale).argmin()
    rows, columns = tilings[best].tolist()
    return rows, columns


@cache
def _tilings(max_tiles: int) -> NDArray[np.int64]:
    """int64 [n, 2]: all (rows, columns), by their product, then by rows."""
    sides = range(1, max_tiles + 1)
    pairs = [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]
    return np.array(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0])), np.int64)


def cut_crops(picture: Tensor, crop: int, step: int) -> Tensor:
    """[H, W, channels] -> [n, crop, crop, channels]: a crop every `step` pixels, row by row."""
    crops: Tensor = picture.unfold(0, crop, step).unfold(1, crop, step)  # [rows, columns, channels, crop, crop]
    return crops.permute(0, 1, 3, 4, 2).flatten(0, 1)


def cut_patches(crops: Tensor, patch: int) -> Tensor:
    """[n, H, W, channels] -> [n, patches, patch * patch * channels]: patches row by row, channels fastest."""
    rows, columns = crops.shape[1] // patch, crops.shape[2] // patch
    patches: Tensor = crops.view(len(crops), rows, patch, columns, patch, -1).transpose(2, 3)
    return patches.reshape(len(crops), rows * columns, -1)
