"""Division of images into tiles that have the input size of a tower, in addition to one tile with the whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindie_mm.media.image.encoded_image import Pixels, Resample, resize
from mindie_mm.media.image.preprocess import pad

CanvasSize = tuple[int, int]
"""Height and width in pixels, both multiples of the tile side."""


def best_canvas(height: int, width: int, canvases: Sequence[CanvasSize]) -> CanvasSize:
    """Return the canvas on which an image keeps the most pixels.

    If several canvases keep equally many pixels, return the smallest of them, or the first of several equally small
    canvases. A very thin image keeps no pixels on a small canvas, because its scaled height or width is rounded to 0.
    """
    best, most, least_wasted = canvases[0], 0, math.inf
    for canvas in canvases:
        scale = min(canvas[1] / width, canvas[0] / height)
        left = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas[0] * canvas[1] - left
        if left > most or (left == most and wasted < least_wasted):
            best, most, least_wasted = canvas, left, wasted
    return best


def fit(height: int, width: int, canvas: CanvasSize) -> tuple[int, int]:
    """Return the height and width of an image that is scaled to fit `canvas` and keeps its aspect ratio."""
    by_width, by_height = canvas[1] / width, canvas[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * by_height), canvas[1])


def closest_grid(height: int, width: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of the grid of tiles whose aspect ratio is nearest to that of an image.

    If two grids are equally near, prefer the larger one if the image has more than half as many pixels as this grid.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        tile: Side of a tile in pixels.
        least: Minimum number of tiles.
        most: Maximum number of tiles.

    """
    sides = range(1, most + 1)
    # Grids with the same number of tiles are sorted by their number of columns, as in the reference.
    grids = sorted(
        ((rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most), key=math.prod
    )
    best, nearest = (1, 1), math.inf
    for rows, columns in grids:
        difference = abs(width / height - columns / rows)
        enough = width * height > 0.5 * tile * tile * columns * rows
        if difference < nearest or (difference == nearest and enough):
            best, nearest = (rows, columns), difference
    return best


def without_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of features that show an image of this size, without its padding.

    `rows` and `columns` are the numbers of rows and columns of features on the whole canvas.
    """
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def cut(rgb: Pixels, tiles: Pixels) -> None:
    """Cut an image into tiles, row by row.

    Args:
        rgb: Pixels, uint8 [rows * tile, columns * tile, 3].
        tiles: Output, uint8 [rows * columns, tile, tile, 3].

    """
    tile = tiles.shape[1]
    rows, columns = rgb.shape[0] // tile, rgb.shape[1] // tile
    for row in range(rows):
        strip = rgb[row * tile : (row + 1) * tile].reshape(tile, columns, tile, 3)
        tiles[row * columns : (row + 1) * columns] = strip.swapaxes(0, 1)


def write_canvas(rgb: Pixels, canvas: CanvasSize, tiles: Pixels, resample: Resample) -> None:
    """Write an image resized to one tile, followed by the tiles of a canvas with the image in its center.

    Args:
        rgb: Pixels, uint8 [height, width, 3].
        canvas: Height and width of the canvas in pixels.
        tiles: Output, uint8 [1 + tiles of the canvas, tile, tile, 3].
        resample: Filter for resizing.

    """
    side = tiles.shape[1]
    tiles[0] = resize(rgb, side, side, resample)
    height, width = fit(rgb.shape[0], rgb.shape[1], canvas)
    fitted = resize(rgb, height, width, resample)
    cut(pad(fitted, *canvas), tiles[1:])
