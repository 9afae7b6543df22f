"""Input of the batch benchmark: generated and cached JPEGs of mixed sizes, with prompts."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg

from mindie_mm.media.image.encoded_image import Pixels
from tests.media_samples import PHOTOGRAPHS, photograph

CACHE = Path(__file__).parents[2] / "build" / "bench-batch"
SIDES = (224, 1600)
"""Range of the longer side in pixels, log-uniform. The average image has 0.46 megapixels."""
ASPECTS = ((1, 1), (4, 3), (3, 2), (16, 9))
QUALITIES = (75, 85, 90, 95)
SCALES = (0.7, 1.0, 1.4)
"""Scales of the photographs before an image is cut from them."""
CANVAS = 2048
QUESTIONS = ("What is in the image?", "Describe this picture.", "Is there a red square or a blue circle? Say which.")


def canvas(scale: float, generator: np.random.Generator) -> Pixels:
    """Return photographs side by side, resized by `scale`, uint8 [CANVAS, CANVAS, 3].

    Photographs have enough detail for a realistic decoding time.
    """
    canvas = np.zeros((CANVAS, CANVAS, 3), np.uint8)
    side = round(300 * scale)
    for top in range(0, CANVAS, side):
        for left in range(0, CANVAS, side):
            image = photograph(PHOTOGRAPHS[generator.integers(len(PHOTOGRAPHS))])
            image = image.resize((round(image.width * scale), round(image.height * scale)))
            x, y = (int(generator.integers(length - side + 1)) for length in image.size)
            tile = np.asarray(image)[y : y + side, x : x + side]
            canvas[top : top + side, left : left + side] = tile[: CANVAS - top, : CANVAS - left]
    return canvas


def size_of(generator: random.Random) -> tuple[int, int]:
    """Draw a height and a width in pixels."""
    longer = round(math.exp(generator.uniform(*map(math.log, SIDES))))
    long, short = generator.choice(ASPECTS)
    sides = (longer, max(1, longer * short // long))
    return sides if generator.random() < 0.4 else sides[::-1]


def write_some(folder: Path, start: int, stop: int) -> None:
    """Write images `start` to `stop`. An image depends only on its number, not on the process that writes it."""
    canvases = [canvas(scale, np.random.default_rng(0)) for scale in SCALES]
    for number in range(start, stop):
        generator = random.Random(number)
        height, width = size_of(generator)
        top, left = generator.randrange(CANVAS - height + 1), generator.randrange(CANVAS - width + 1)
        cut = generator.choice(canvases)[top : top + height, left : left + width]
        if generator.random() < 0.5:
            cut = cut[:, ::-1]
        subsampling = "444" if generator.random() < 0.2 else "420"
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(cut), generator.choice(QUALITIES), "RGB", subsampling)
        (folder / f"{number:06d}.jpg").write_bytes(data)


def image_folder(count: int) -> Path:
    """Return a folder with `count` JPEGs from 000000.jpg. Two processes write the files that do not exist."""
    folder = CACHE / f"images-{count}"
    mark = folder / "complete"
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        step = max(1, count // 20)
        starts = range(0, count, step)
        with ProcessPoolExecutor(2) as pool:
            list(pool.map(write_some, [folder] * len(starts), starts, [min(start + step, count) for start in starts]))
        mark.touch()
    return folder


def rows(folder: Path, path: Path, numbers: range, small_but_each: tuple[int, int] | None = None) -> Path:
    """Write a JSONL file to `path`, and return `path`. Each row has an image from `folder` and a question.

    Args:
        folder: Folder of the images.
        path: File to write.
        numbers: Row numbers. A row's image has the same number, modulo the number of images.
        small_but_each: A maximum number of pixels and an interval. Within each interval, one row has an image as above.
            All other rows use the images with the smallest files, and set `max_pixels` to this maximum.

    """
    files = sorted(folder.glob("*.jpg"))
    small = sorted(files, key=lambda file: file.stat().st_size)[: max(1, len(files) // 2)]
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            image: dict[str, object] = {"image": str(files[number % len(files)])}
            if small_but_each is not None and number % small_but_each[1]:
                image = {"image": str(small[number % len(small)]), "max_pixels": small_but_each[0]}
            question = {"text": QUESTIONS[number % len(QUESTIONS)]}
            file.write(json.dumps({"id": f"{number}", "inputs": [image, question]}) + "\n")
    return path
