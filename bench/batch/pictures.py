"""JPEGs of mixed sizes with prompts, made here and kept: what the contestants read."""

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
"""Pixels of the longer side, drawn from it evenly by logarithm: 0.46 megapixels on average."""
ASPECTS = ((1, 1), (4, 3), (3, 2), (16, 9))
QUALITIES = (75, 85, 90, 95)
SCALES = (0.7, 1.0, 1.4)
"""Of the photographs that a picture is cut from."""
CANVAS = 2048
QUESTIONS = ("What is in the image?", "Describe this picture.", "Is there a red square or a blue circle? Say which.")


def canvas(scale: float, generator: np.random.Generator) -> Pixels:
    """uint8 [CANVAS, CANVAS, 3]: photographs beside each other at that scale, as pictures need detail to decode."""
    made = np.zeros((CANVAS, CANVAS, 3), np.uint8)
    side = round(300 * scale)
    for top in range(0, CANVAS, side):
        for left in range(0, CANVAS, side):
            image = photograph(PHOTOGRAPHS[generator.integers(len(PHOTOGRAPHS))])
            image = image.resize((round(image.width * scale), round(image.height * scale)))
            x, y = (int(generator.integers(length - side + 1)) for length in image.size)
            tile = np.asarray(image)[y : y + side, x : x + side]
            made[top : top + side, left : left + side] = tile[: CANVAS - top, : CANVAS - left]
    return made


def size_of(generator: random.Random) -> tuple[int, int]:
    """Height and width."""
    longer = round(math.exp(generator.uniform(*map(math.log, SIDES))))
    long, short = generator.choice(ASPECTS)
    sides = (longer, max(1, longer * short // long))
    return sides if generator.random() < 0.4 else sides[::-1]


def write_some(folder: Path, start: int, stop: int) -> None:
    """Pictures [start, stop): each by its own number alone, whoever makes it."""
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


def pictures(count: int) -> Path:
    """A folder of that many JPEGs, 000000.jpg and on; made by two processes unless it is there."""
    folder = CACHE / f"pictures-{count}"
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
    """A JSONL at `path`: the picture of each number, modulo how many there are, and a question.

    With `small_but_each`, a number of pixels and an interval, only one row in each interval is like that; the others
    have the smaller half of the pictures, at most so many pixels of each.
    """
    pictures = sorted(folder.glob("*.jpg"))
    small = sorted(pictures, key=lambda file: file.stat().st_size)[: max(1, len(pictures) // 2)]
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            image: dict[str, object] = {"image": str(pictures[number % len(pictures)])}
            if small_but_each is not None and number % small_but_each[1]:
                image = {"image": str(small[number % len(small)]), "max_pixels": small_but_each[0]}
            question = {"text": QUESTIONS[number % len(QUESTIONS)]}
            file.write(json.dumps({"id": f"{number}", "inputs": [image, question]}) + "\n")
    return path
