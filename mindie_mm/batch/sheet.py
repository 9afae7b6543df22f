"""The pictures of a row on one page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_GAP = 8
_GROUND = (255, 255, 255)


def contact_sheet(pictures: Sequence[NDArray[np.uint8]], side: int = 256, columns: int | None = None) -> Image.Image:
    """RGB, the pictures uint8 [height, width, 3] in rows, each within `side` pixels; about as wide as high."""
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (_GAP + columns * (side + _GAP), _GAP + rows * (side + _GAP)), _GROUND)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        image = Image.fromarray(np.ascontiguousarray(picture))
        image.thumbnail((side, side))
        left, top = (_GAP + place * (side + _GAP) for place in (column, row))
        sheet.paste(image, (left + (side - image.width) // 2, top + (side - image.height) // 2))
    return sheet
