"""Pictures as tiles of the size that a tower takes, beside the whole picture in one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindie_mm.media.image.encoded_image import Pixels, Resample, resize
from mindie_mm.media.image.preprocess import pad

CanvasSize = tuple[int, int]
"""Height and width in pixels, whole numbers of tiles."""


def best_canvas(height: int, width: int, canvases: Sequence[CanvasSize]) -> CanvasSize:
    """Return the canvas that keeps the most pixels of a picture. Among equals, the first of the smallest is returned.

    A picture as thin as a line keeps no pixels on small canvases. These canvases are then equal.
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
    """Height and width that a picture has on `canvas`, its proportions kept."""
    by_width, by_height = canvas[1] / width, canvas[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * by_height), canvas[1])


def closest_grid(height: int, width: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of `least` to `most` tiles whose proportions are nearest to those of a picture.

    Of several as near ones the last, those with most tiles, as long as the picture has half as many pixels as they.
    """
    sides = range(1, most + 1)
    # By their number alone: those of one number stay in the order of their columns, as in the reference.
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
    """How many of a canvas's `rows` and `columns` of features a picture of `height` and `width` takes."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def cut(rgb: Pixels, tiles: Pixels) -> None:
    """uint8 [rows * tile, columns * tile, 3] -> `tiles` [rows * columns, tile, tile, 3], row by row."""
    tile = tiles.shape[1]
    rows, columns = rgb.shape[0] // tile, rgb.shape[1] // tile
    for row in range(rows):
        strip = rgb[row * tile : (row + 1) * tile].reshape(tile, columns, tile, 3)
        tiles[row * columns : (row + 1) * columns] = strip.swapaxes(0, 1)


def write_canvas(rgb: Pixels, canvas: CanvasSize, tiles: Pixels, resample: Resample) -> None:
    """The picture as it is resized to one tile, then the tiles of `canvas`, in whose middle it stands.

    Into `tiles`, uint8 [1 + tiles of the canvas, tile, tile, 3].
    """
    side = tiles.shape[1]
    tiles[0] = resize(rgb, side, side, resample)
    height, width = fit(rgb.shape[0], rgb.shape[1], canvas)
    fitted = resize(rgb, height, width, resample)
    cut(pad(fitted, *canvas), tiles[1:])
