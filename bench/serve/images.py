"""Distinct JPEGs as data: URLs. The images are gradients with noise, so that decoding takes a realistic time."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pybase64
from PIL import Image

QUALITY = 90
GRAIN = 8
"""Side of a grain of noise in pixels."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of an image in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, text: str) -> Size:
        """Parse a size such as `640x480`."""
        width, height = map(int, text.split("x"))
        return cls(width, height)


def jpeg(seed: int, size: Size) -> bytes:
    """Return image number `seed` as a JPEG file."""
    generator = np.random.default_rng(seed)
    across = np.linspace(0, 255, size.width)[None, :, None] * generator.random(3)
    down = np.linspace(0, 255, size.height)[:, None, None] * generator.random(3)
    grains = generator.integers(0, 90, (size.height // GRAIN, size.width // GRAIN, 3), dtype=np.uint8)
    noise = Image.fromarray(grains).resize((size.width, size.height), Image.Resampling.BILINEAR)
    pixels = np.clip((across + down) * 0.6 + np.asarray(noise, np.float32), 0, 255)  # [height, width, 3]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def data_url(seed: int, size: Size) -> str:
    """Return the same image as a data: URL."""
    return f"data:image/jpeg;base64,{pybase64.b64encode(jpeg(seed, size)).decode()}"
