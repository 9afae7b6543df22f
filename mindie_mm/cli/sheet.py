"""Contact sheets: the images of a row on one page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_SIDE, _GAP = 256, 8
_GROUND = (255, 255, 255)


def contact_sheet(images: Sequence[NDArray[np.uint8]]) -> Image.Image:
    """Return a page with the images in a grid. The page is about as wide as it is high.

    Args:
        images: RGB images, uint8 [height, width, 3]. Each image is reduced to at most `_SIDE` x `_SIDE` pixels.

    """
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (_GAP + columns * (_SIDE + _GAP), _GAP + rows * (_SIDE + _GAP)), _GROUND)
    for index, pixels in enumerate(images):
        row, column = divmod(index, columns)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        image.thumbnail((_SIDE, _SIDE))
        left, top = (_GAP + place * (_SIDE + _GAP) for place in (column, row))
        sheet.paste(image, (left + (_SIDE - image.width) // 2, top + (_SIDE - image.height) // 2))
    return sheet
