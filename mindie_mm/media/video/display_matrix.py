"""Rotation and mirroring of video frames according to the display matrix in the container."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

import av
import numpy as np
from av.sidedata.sidedata import Type

from mindie_mm.media.image.encoded_image import Pixels


@dataclass(frozen=True, slots=True)
class Orientation:
    """One of the eight orientations of a frame. To make a frame upright, transpose it first, then mirror or flip it."""

    transposed: bool = False
    """True if rows become columns."""
    mirrored: bool = False
    """True if left and right are swapped."""
    flipped: bool = False
    """True if top and bottom are swapped."""

    @classmethod
    def of(cls, frame: av.VideoFrame) -> Self:
        """Read the display matrix of `frame`. Angles are rounded to multiples of 90 degrees, as in torchcodec."""
        matrix = frame.side_data.get(Type.DISPLAYMATRIX)
        if matrix is None:
            return cls()
        a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
        # The pixel (x, y) is shown at (a x + c y, b x + d y), apart from a translation.
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, a < 0, d < 0)
        return cls(True, c < 0, b < 0)

    def apply(self, pixels: Pixels) -> Pixels:
        """Return `pixels` upright and contiguous: [height, width, 3], or [width, height, 3] if transposed."""
        if self.transposed:
            pixels = pixels.swapaxes(0, 1)
        return np.ascontiguousarray(pixels[:: -1 if self.flipped else 1, :: -1 if self.mirrored else 1], np.uint8)
