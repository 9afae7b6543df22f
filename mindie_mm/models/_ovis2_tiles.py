"""Tiles of images as Ovis2 uses them: the choice of a grid, and the padded tiles of its authors' code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mindie_mm.media.image.encoded_image import Pixels, Resample, resize

_COVERED = 0.9
"""Part of an image that the tiles of its grid must cover without being shrunk."""
Box = tuple[int, int, int, int]
"""Top, left, bottom and right of a part of an image in pixels."""


def num_tiles(grid: Sequence[int]) -> int:
    """Return the number of tiles of an image with this grid (rows, columns), including the tile of the whole image."""
    tiles = grid[0] * grid[1]
    return tiles + 1 if tiles > 1 else 1


def covering_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of the smallest grid of tiles that covers enough of an image.

    If no grid covers enough, return the grid that covers the most.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        side: Side of a tile in pixels.
        most: Maximum number of tiles.

    """
    covered = [(grid, _covered(height, width, grid, side)) for grid in _grids(most)]
    if enough := [one for one in covered if one[1] > _COVERED]:
        return min(enough, key=lambda one: (one[0][0] * one[0][1], -one[1]))[0]
    return min(covered, key=lambda one: (-one[1], one[0][0] * one[0][1]))[0]


@cache
def _grids(most: int) -> list[tuple[int, int]]:
    """Return all grids (rows, columns) of at most this number of tiles."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


def _covered(height: int, width: int, grid: tuple[int, int], side: int) -> float:
    """Return the part of an image that is left if each cell of a grid is shrunk to fit a tile."""
    total = 0.0
    for top, left, bottom, right in _cells(height, width, grid):
        long, short = max(bottom - top, right - left), min(bottom - top, right - left)
        total += long * short if long <= side else side * (short / long * side)
    return total / (height * width)


def _cells(height: int, width: int, grid: Sequence[int]) -> Iterator[Box]:
    """Yield the cells of an image, row by row. The last row and column take the remaining pixels."""
    rows, columns = grid
    row_height, column_width = height // rows, width // columns
    for row in range(rows):
        bottom = height if row == rows - 1 else (row + 1) * row_height
        for column in range(columns):
            right = width if column == columns - 1 else (column + 1) * column_width
            yield row * row_height, column * column_width, bottom, right


def padded_tiles(height: int, width: int, grid: Sequence[int], side: int) -> list[tuple[Box, tuple[int, int]]]:
    """Return the part of the image that each tile shows, and the height and width to which the part is resized.

    The first tile shows the whole image. The longer side of a part becomes `side`, and the rest of its tile is padding.
    """
    boxes = [(0, 0, height, width), *(_cells(height, width, grid) if num_tiles(grid) > 1 else ())]
    return [(box, _fitted(box[2] - box[0], box[3] - box[1], side)) for box in boxes]


def _fitted(height: int, width: int, side: int) -> tuple[int, int]:
    if not min(height, width):
        return 0, 0
    return (int(height / width * side), side) if width > height else (side, int(width / height * side))


def write_padded(
    rgb: Pixels,
    parts: Sequence[tuple[Box, tuple[int, int]]],
    tiles: Pixels,
    sizes: NDArray[np.int32],
    resample: Resample,
) -> None:
    """Write the tiles of an image, each with a resized part of the image in its center.

    Args:
        rgb: Pixels, uint8 [height, width, 3].
        parts: Result of `padded_tiles`.
        tiles: Output, uint8 [tiles, side, side, 3].
        sizes: Output, the height and width of each part in its tile, int32 [tiles, 2].
        resample: Filter for resizing.

    """
    tiles[...] = 0
    for tile, size, ((top, left, bottom, right), (height, width)) in zip(tiles, sizes, parts, strict=True):
        size[...] = height, width
        above, before = (len(tile) - height) // 2, (len(tile) - width) // 2
        tile[above : above + height, before : before + width] = resize(
            rgb[top:bottom, left:right], height, width, resample
        )
