"""Tests that scenes are reproducible and match their descriptions. Training and held-out scenes are separate."""

import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from training.phrasings import QUESTIONS
from training.questions import careless
from training.samples import TASKS, sample
from training.scenes import (
    COLOURS,
    DIRECTIONS,
    HELD_OUT,
    SHAPES,
    SIDES,
    TRAIN,
    Scene,
    draw,
    in_split,
    moving,
    placed,
    several,
    single,
)
from training.small_talk import CHAT

SPLITS = pytest.mark.parametrize("split", [TRAIN, HELD_OUT], ids=lambda split: split.name)


def plain(scene: Scene) -> Scene:
    """Return the scene on black and without JPEG artifacts. Every pixel that is not black is then part of an object."""
    return replace(scene, ground=(0, 0, 0), quality=None)


def lit(scene: Scene) -> np.ndarray:
    """Return a mask of the pixels that belong to objects, bool [H, W]."""
    return np.asarray(draw(plain(scene))).max(axis=2) > 60


def regions(mask: np.ndarray) -> int:
    """Return the number of connected regions of a mask. Pixels that share only a corner are connected."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    number = 0
    while left:
        number += 1
        front = [left.pop()]
        while front:
            y, x = front.pop()
            for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                if near in left:
                    left.remove(near)
                    front.append(near)
    return number


def small(scene: Scene) -> Scene:
    """Return the scene on a canvas of at most 160 pixels, which is faster."""
    shrink = min(1.0, 160 / max(scene.width, scene.height))
    width, height = round(scene.width * shrink), round(scene.height * shrink)
    return replace(scene, width=width, height=height)


def test_splits_share_no_side_ground_or_quality() -> None:
    assert not set(TRAIN.sides) & set(HELD_OUT.sides)
    assert not set(TRAIN.grounds) & set(HELD_OUT.grounds)
    assert not set(TRAIN.qualities) & set(HELD_OUT.qualities)


@SPLITS
def test_positions_and_sizes_keep_to_their_split(split) -> None:
    rng = random.Random(3)
    for _ in range(60):
        scenes = [single(rng, split), placed(rng, split, rng.choice(SIDES)), several(rng, split, 3)]
        for thing in (thing for scene in scenes for thing in scene.things):
            assert in_split(split, thing.x, thing.y)
            assert round(thing.size * 100) % 2 == 1 - split.parity


def test_no_held_out_phrasing_is_ever_seen_in_training() -> None:
    for phrasings in (*QUESTIONS.values(), *CHAT.values()):
        rng = random.Random(1)
        seen = {careless(rng, text) for text in phrasings.train for _ in range(200)}
        assert not (seen | set(phrasings.train)) & set(phrasings.held_out)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_sample(task: str) -> None:
    first, second = (sample(random.Random(11), TRAIN, task) for _ in range(2))
    assert first.turns == second.turns
    for a, b in zip(first.images + first.frames, second.images + second.frames, strict=True):
        assert a.tobytes() == b.tobytes()


@SPLITS
def test_the_count_is_the_number_of_regions(split) -> None:
    rng = random.Random(5)
    for count in (1, 2, 3, 4) * 5:
        assert regions(lit(small(several(rng, split, count)))) == count


@SPLITS
@pytest.mark.parametrize("colour", COLOURS)
def test_the_thing_has_its_colour(split, colour: str) -> None:
    scene = small(single(random.Random(7), split, colour))
    pixels = np.asarray(draw(plain(scene)))[lit(scene)]
    distances = {
        name: min(np.abs(np.median(pixels, axis=0) - shade).max() for shade in shades)
        for name, shades in COLOURS.items()
    }
    assert min(distances, key=distances.__getitem__) == colour


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ("circle", 0.75, 0.88),
        ("square", 0.96, 1.12),
        ("triangle", 0.44, 0.55),
        ("star", 0.28, 0.42),
        ("cross", 0.53, 0.68),
    ],
)
def test_the_shape_covers_its_share_of_its_box(shape: str, low: float, high: float) -> None:
    scene = single(random.Random(2), TRAIN, "red", shape)
    thing = scene.things[0]
    side = thing.size * min(scene.width, scene.height)
    assert low < lit(scene).sum() / side**2 < high


def test_every_shape_is_tested() -> None:
    assert set(SHAPES) == {"circle", "square", "triangle", "star", "cross"}


@SPLITS
@pytest.mark.parametrize("side", SIDES)
def test_the_thing_is_at_the_described_side(split, side: str) -> None:
    rng = random.Random(9)
    for _ in range(10):
        mask = lit(small(placed(rng, split, side)))
        y, x = np.argwhere(mask).mean(axis=0) / mask.shape - 0.5
        offsets = {"left": -x, "right": x, "top": -y, "bottom": y}
        assert max(offsets, key=offsets.__getitem__) == side


@SPLITS
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_thing_moves_in_the_described_direction(split, direction: str) -> None:
    scenes = moving(random.Random(4), split, direction, 4)
    masks = [lit(small(scene)) for scene in scenes]
    steps = np.diff([np.argwhere(mask).mean(axis=0) / mask.shape for mask in masks], axis=0)
    axis, sign = {"up": (0, -1), "down": (0, 1), "left": (1, -1), "right": (1, 1)}[direction]
    assert (steps[:, axis] * sign > 0.02).all()
    assert (np.abs(steps[:, axis]) > 2 * np.abs(steps[:, 1 - axis])).all()


def test_jpeg_quality_none_is_lossless() -> None:
    scene = Scene(96, 96, (10, 20, 30), (), None)
    assert draw(scene).tobytes() == Image.new("RGB", (96, 96), (10, 20, 30)).tobytes()
