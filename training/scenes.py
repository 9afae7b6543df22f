"""Drawn scenes with known contents, for the training and evaluation of the embedded checkpoint.

A scene is described first (`Scene`, `Thing`) and drawn afterwards, so that the answer never comes
from the pixels. The two splits do not share any image sizes, ground levels, JPEG qualities, object
scales or cells of the position grid.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]
SplitName = Literal["train", "held_out"]

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 40, 40), (200, 20, 30)),
    "green": ((0, 128, 0), (0, 180, 60), (40, 160, 60), (0, 255, 0)),
    "blue": ((0, 0, 255), (40, 80, 220), (30, 60, 190)),
    "yellow": ((255, 255, 0), (240, 220, 40), (250, 230, 60)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 130, 30)),
    "purple": ((128, 0, 128), (140, 50, 180), (120, 30, 160)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 140, 190)),
    "cyan": ((0, 255, 255), (0, 200, 220), (60, 220, 230)),
}
SIDES = ("left", "right", "top", "bottom")
DIRECTIONS = ("left", "right", "up", "down")
MAX_COUNT = 4
JITTER = 12
GRID_CELLS = 25


@dataclass(frozen=True, slots=True)
class Split:
    """Values from which one split draws. The two splits do not share any value."""

    name: SplitName
    sides: tuple[int, ...]
    """Widths and heights of images, in pixels."""
    grounds: tuple[int, ...]
    """Gray levels of the background before the tint."""
    qualities: tuple[int, ...]
    """JPEG qualities."""
    parity: int
    """Parity of the split's cells in the position grid, which is divided like a chessboard."""


def _sides(start: int, stop: int, held_out: bool) -> tuple[int, ...]:
    return tuple(side for side in range(start, stop) if (side % 8 != 0) == held_out)


TRAIN = Split(
    "train",
    sides=_sides(80, 641, held_out=False),
    grounds=(*range(15), *range(28, 49), *range(224, 237), *range(246, 256)),
    qualities=tuple(range(50, 97, 2)),
    parity=0,
)
HELD_OUT = Split(
    "held_out",
    sides=_sides(80, 1001, held_out=True),
    grounds=(*range(15, 28), *range(237, 246)),
    qualities=tuple(range(55, 96, 2)),
    parity=1,
)


@dataclass(frozen=True, slots=True)
class Thing:
    """One colored shape. Lengths are fractions of the image. `size` is a fraction of its shorter side."""

    colour: str
    shape: str
    rgb: Rgb
    x: float
    y: float
    size: float
    turn: float
    """Rotation in degrees, counter-clockwise."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Description of an image."""

    width: int
    height: int
    ground: Rgb
    things: tuple[Thing, ...]
    quality: int | None
    """JPEG quality, or None for a lossless image."""


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the polygon of a shape, except a circle, in a box of side 1 about the origin."""
    if shape == "square":
        return [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)]
    if shape == "triangle":
        return [(0.0, -0.5), (0.5, 0.45), (-0.5, 0.45)]
    if shape == "cross":
        a, b = 0.5, 0.17
        half = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b)]
        return half + [(-x, -y) for x, y in half]
    if shape == "star":
        radii = [0.54 if i % 2 == 0 else 0.22 for i in range(10)]
        turns = [math.pi * i / 5 for i in range(10)]
        return [(r * math.sin(t), -r * math.cos(t)) for r, t in zip(radii, turns, strict=True)]
    raise ValueError(f"no outline for {shape!r}")


def _stamp(thing: Thing, side: float) -> Image.Image:
    """Draw the object's antialiased coverage mask, about `1.5 * side` pixels wide."""
    over = 3 if side < 120 else 1
    box = max(4, math.ceil(1.5 * side))
    mask = Image.new("L", (box * over, box * over))
    draw = ImageDraw.Draw(mask)
    middle, scale = box * over / 2, side * over
    if thing.shape == "circle":
        r = scale / 2
        draw.ellipse((middle - r, middle - r, middle + r, middle + r), fill=255)
    else:
        cos, sin = math.cos(math.radians(thing.turn)), math.sin(math.radians(thing.turn))
        points = [
            (middle + scale * (x * cos + y * sin), middle + scale * (y * cos - x * sin))
            for x, y in outline(thing.shape)
        ]
        draw.polygon(points, fill=255)
    return mask.reduce(over) if over > 1 else mask


def draw(scene: Scene) -> Image.Image:
    """Draw the scene as an RGB image with its JPEG artifacts."""
    picture = Image.new("RGB", (scene.width, scene.height), scene.ground)
    short = min(scene.width, scene.height)
    for thing in scene.things:
        mask = _stamp(thing, thing.size * short)
        left = round(thing.x * scene.width - mask.width / 2)
        top = round(thing.y * scene.height - mask.height / 2)
        picture.paste(thing.rgb, (left, top), mask)
    if scene.quality is None:
        return picture
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=scene.quality)
    return Image.open(buffer).convert("RGB")


def _shade(rng: random.Random, colour: str) -> Rgb:
    r, g, b = rng.choice(COLOURS[colour])
    return _clip(r + _wobble(rng), g + _wobble(rng), b + _wobble(rng))


def _wobble(rng: random.Random) -> int:
    return rng.randint(-JITTER, JITTER)


def _clip(r: int, g: int, b: int) -> Rgb:
    return max(0, min(255, r)), max(0, min(255, g)), max(0, min(255, b))


def _scale(rng: random.Random, split: Split, low: float, high: float) -> float:
    """Draw an object's size in whole hundredths: odd for training, even for the held-out split."""
    hundredths = rng.randrange(round(low * 100), round(high * 100))
    return (hundredths // 2 * 2 + 1 - split.parity) / 100


def in_split(split: Split, x: float, y: float) -> bool:
    """Return whether the position lies in a cell of the split."""
    return (int(x * GRID_CELLS) + int(y * GRID_CELLS)) % 2 == split.parity


def _place(rng: random.Random, split: Split, xs: tuple[float, float], ys: tuple[float, float]) -> tuple[float, float]:
    while True:
        x, y = rng.uniform(*xs), rng.uniform(*ys)
        if in_split(split, x, y):
            return x, y


def _turn(rng: random.Random) -> float:
    return rng.uniform(-10, 10) if rng.random() < 0.5 else 0.0


def canvas(rng: random.Random, split: Split, longest: int = 1000) -> Scene:
    """Draw an empty scene with a size, a background and a JPEG quality. Most scenes are small, to save drawing time."""
    usual = longest if rng.random() < 0.08 else min(longest, 200)
    width = rng.choice([side for side in split.sides if side <= usual])
    fitting = [side for side in split.sides if 0.6 * width <= side <= width / 0.6]
    height = rng.choice([side for side in fitting if side <= usual])
    level = rng.choice(split.grounds)
    # The tint must stay within the split's levels.
    tinted = [rng.choice([v for v in split.grounds if abs(v - level) <= 10]) for _ in range(3)]
    ground = (tinted[0], tinted[1], tinted[2]) if rng.random() < 0.3 else (level, level, level)
    quality = rng.choice(split.qualities) if rng.random() < 0.6 else None
    return Scene(width, height, ground, (), quality)


def _margins(scene: Scene, size: float) -> tuple[float, float]:
    """Return the smallest distances of a center from the edges, as fractions of width and height."""
    reach = size * min(scene.width, scene.height) / 2
    return reach / scene.width + 0.01, reach / scene.height + 0.01


def single(rng: random.Random, split: Split, colour: str | None = None, shape: str | None = None) -> Scene:
    """Place one object anywhere in the image."""
    scene = canvas(rng, split)
    colour, shape = colour or rng.choice(list(COLOURS)), shape or rng.choice(SHAPES)
    size = _scale(rng, split, 0.35, 0.8)
    mx, my = _margins(scene, size)
    x, y = _place(rng, split, (mx, 1 - mx), (my, 1 - my))
    thing = Thing(colour, shape, _shade(rng, colour), x, y, size, _turn(rng))
    return replace(scene, things=(thing,))


def filled(rng: random.Random, split: Split, colour: str) -> Scene:
    """Return an image of a single color."""
    return replace(canvas(rng, split), ground=_shade(rng, colour))


def placed(rng: random.Random, split: Split, side: str) -> Scene:
    """Place one object clearly at the left, right, top or bottom."""
    scene = canvas(rng, split)
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    size = _scale(rng, split, 0.18, 0.42)
    across = side in ("left", "right")
    margin = _margins(scene, size)[0 if across else 1]
    near = (margin, max(0.31, margin + 0.05))
    far = (1 - near[1], 1 - near[0])
    main, other = (near if side in ("left", "top") else far), (0.4, 0.6)
    x, y = _place(rng, split, *((main, other) if across else (other, main)))
    thing = Thing(colour, shape, _shade(rng, colour), x, y, size, _turn(rng))
    return replace(scene, things=(thing,))


def several(rng: random.Random, split: Split, count: int) -> Scene:
    """Place `count` objects that do not touch. In half of the scenes, all have the same color and shape."""
    scene = canvas(rng, split)
    short = min(scene.width, scene.height)
    uniform = rng.random() < 0.5
    kind = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    things: list[Thing] = []
    low, high = 0.18, 0.36
    while len(things) < count:
        colour, shape = kind if uniform else (rng.choice(list(COLOURS)), rng.choice(SHAPES))
        for _ in range(40):
            size = _scale(rng, split, low, high)
            mx, my = _margins(scene, size)
            x, y = _place(rng, split, (mx, 1 - mx), (my, 1 - my))
            dx, dy = scene.width / short, scene.height / short
            gaps = (math.hypot((x - t.x) * dx, (y - t.y) * dy) - 0.62 * (size + t.size) for t in things)
            if all(gap > 0.03 for gap in gaps):
                rgb = _shade(rng, colour)
                things.append(Thing(colour, shape, rgb, x, y, size, _turn(rng)))
                break
        else:  # the image is too crowded, so begin again with smaller objects
            things, high = [], max(low + 0.04, high - 0.04)
    return replace(scene, things=tuple(things))


def moving(rng: random.Random, split: Split, direction: str, frames: int) -> list[Scene]:
    """Describe a video of one object that crosses most of the image at a constant speed."""
    scene = canvas(rng, split, longest=320)
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    size = _scale(rng, split, 0.18, 0.40)
    mx, my = _margins(scene, size)
    margin, aside = (mx, my) if direction in ("left", "right") else (my, mx)
    room = 1 - 2 * margin
    while True:
        travel = room * rng.uniform(0.6, 1.0)
        start = margin + rng.uniform(0, room - travel)
        cross = rng.uniform(max(aside, 0.2), min(1 - aside, 0.8))
        if in_split(split, start, cross):
            break
    drift = rng.uniform(-0.04, 0.04)
    thing = Thing(colour, shape, _shade(rng, colour), 0, 0, size, _turn(rng))
    scenes = []
    for i in range(frames):
        done = i / (frames - 1)
        along = start + travel * (done if direction in ("right", "down") else 1 - done)
        side = cross + drift * done
        x, y = (along, side) if direction in ("left", "right") else (side, along)
        scenes.append(replace(scene, things=(replace(thing, x=x, y=y),)))
    return scenes


def draw_all(scenes: Sequence[Scene]) -> tuple[Image.Image, ...]:
    """Draw every scene, in order."""
    return tuple(draw(scene) for scene in scenes)
