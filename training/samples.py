"""Questions about drawn scenes and sounds, with their answers. Each seed, task and split has one `Sample`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from PIL import Image

from training.questions import CLIPS, NOUNS, RECORDINGS, ask, chat
from training.scenes import (
    COLOURS,
    DIRECTIONS,
    MAX_COUNT,
    SHAPES,
    SIDES,
    Scene,
    Split,
    Thing,
    draw,
    draw_all,
    filled,
    moving,
    placed,
    several,
    single,
)
from training.sounds import SOUNDS, Sound

TASKS = ("name", "where", "count", "compare", "motion", "chat", "tone", "beeps", "digit", "mixed")
HEARING = ("tone", "beeps", "digit")
MEDIA = ("image", "video", "audio")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are helpful.", "Answer briefly.")

Turn = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation about images, a video and a sound."""

    task: str
    images: tuple[Image.Image, ...]
    frames: tuple[Image.Image, ...]
    """Sampled frames of the video, if there is one."""
    turns: tuple[Turn, ...]
    """Questions and answers. The media belong to the first question."""
    text_first: bool = False
    system: str | None = None
    scenes: tuple[Scene, ...] = ()
    """Descriptions of the drawn media: a scene per image, then a scene per frame."""
    sounds: tuple[Sound, ...] = ()
    """Descriptions of the sounds, which are not synthesized yet."""
    order: tuple[str, ...] = MEDIA
    """Kinds of media, in the same order as in the prompt."""


Maker = Callable[[random.Random, Split], Sample]


def _called(thing: Thing) -> tuple[str, ...]:
    """Return nouns for an object that do not reveal the answer to the question."""
    return ("shape", "object", thing.shape, f"{thing.colour} {thing.shape}")


def _names(rng: random.Random, split: Split, thing: Thing, nouns: tuple[str, ...]) -> Turn:
    kind = rng.choice(("what", "what", "colour", "shape"))
    answer = {"what": f"{thing.colour} {thing.shape}", "colour": thing.colour, "shape": thing.shape}
    names = ("shape", "object", thing.shape) if kind == "colour" else ("shape", "object")
    return ask(rng, split.name, kind, names, nouns), answer[kind]


def name(rng: random.Random, split: Split) -> Sample:
    """Ask for the object, its color or its shape in an image."""
    if rng.random() < 0.03:
        colour = rng.choice(list(COLOURS))
        question = ask(rng, split.name, "colour")
        scene = filled(rng, split, colour)
        return Sample("name", (draw(scene),), (), ((question, colour),), scenes=(scene,))
    if split.name == "held_out" or rng.random() < 0.7:
        scene = single(rng, split)
    else:
        scene = placed(rng, split, rng.choice(SIDES))
    turn = _names(rng, split, scene.things[0], NOUNS)
    return Sample("name", (draw(scene),), (), (turn,), scenes=(scene,))


def where(rng: random.Random, split: Split) -> Sample:
    """Ask on which side of the image the only object is."""
    side = rng.choice(SIDES)
    scene = placed(rng, split, side)
    thing = scene.things[0]
    turns = [(ask(rng, split.name, "where", _called(thing)), side)]
    if split.name == "train" and rng.random() < 0.25:
        turns.insert(rng.randrange(2), _names(rng, split, thing, NOUNS))
    return Sample("where", (draw(scene),), (), tuple(turns), scenes=(scene,))


def count(rng: random.Random, split: Split) -> Sample:
    """Ask for the number of objects, from 1 to 4."""
    number = rng.randint(1, MAX_COUNT)
    scene = several(rng, split, number)
    first = scene.things[0]
    names = ["shape", "object", "thing"]
    if all(thing.shape == first.shape for thing in scene.things):
        names.append(first.shape)
        if all(thing.colour == first.colour for thing in scene.things):
            names.append(f"{first.colour} {first.shape}")
    turn = ask(rng, split.name, "count", tuple(names)), str(number)
    return Sample("count", (draw(scene),), (), (turn,), scenes=(scene,))


def _verdict(one: str, other: str) -> str:
    """State both properties before the verdict, because a small model compares better after it has written both."""
    return f"{one} and {other}, so {'yes' if one == other else 'no'}"


def compare(rng: random.Random, split: Split) -> Sample:
    """Show two images, and ask whether the colors or shapes match, or what both show."""
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    other_colour = colour if rng.random() < 0.5 else rng.choice([c for c in COLOURS if c != colour])
    other_shape = shape if rng.random() < 0.5 else rng.choice([s for s in SHAPES if s != shape])
    scenes = [single(rng, split, colour, shape), single(rng, split, other_colour, other_shape)]
    answers = {
        "same colour": _verdict(colour, other_colour),
        "same shape": _verdict(shape, other_shape),
        "both": f"{colour} {shape} and {other_colour} {other_shape}",
    }
    kinds: tuple[str, ...] = (rng.choice(("both", "same colour", "same colour", "same shape", "same shape")),)
    if split.name == "train" and rng.random() < 0.3:
        kinds = tuple(rng.sample(list(answers), 2))
    turns = tuple((ask(rng, split.name, kind), answers[kind]) for kind in kinds)
    return Sample("compare", draw_all(scenes), (), turns, scenes=tuple(scenes))


def motion(rng: random.Random, split: Split) -> Sample:
    """Ask in which direction the only object in a video moves."""
    direction = rng.choice(DIRECTIONS)
    scenes = moving(rng, split, direction, rng.choice((4, 4, 6, 6, 8, 8, 10)))
    thing = scenes[0].things[0]
    turns = [(ask(rng, split.name, "motion", _called(thing), CLIPS), direction)]
    if split.name == "train" and rng.random() < 0.2:
        turns.insert(rng.randrange(2), _names(rng, split, thing, CLIPS))
    return Sample("motion", (), draw_all(scenes), tuple(turns), scenes=tuple(scenes))


def _said(sound: Sound) -> str:
    """Describe a sound, in answer to an open question."""
    return {"tone": f"{sound.answer} tone", "beeps": f"{sound.answer} beeps"}.get(sound.kind, sound.answer)


def _hears(rng: random.Random, split: Split, sound: Sound) -> Turn:
    if rng.random() < 0.25:
        return ask(rng, split.name, "hear", nouns=RECORDINGS), _said(sound)
    return ask(rng, split.name, sound.kind, nouns=RECORDINGS), sound.answer


def hearing(kind: str) -> Maker:
    """Return a function that makes questions about a sound: its pitch, its number of beeps, or its digit."""

    def heard(rng: random.Random, split: Split) -> Sample:
        sound = SOUNDS[kind](rng, split)
        return Sample(kind, (), (), (_hears(rng, split, sound),), sounds=(sound,))

    return heard


def mixed(rng: random.Random, split: Split) -> Sample:
    """Show an image, a video or both with a sound, and ask about one of them or all."""
    sound = SOUNDS[rng.choice(HEARING)](rng, split)
    seen = rng.choice(("image", "image", "video", "both"))
    picture = single(rng, split) if seen != "video" else None
    direction = rng.choice(DIRECTIONS)
    scenes = moving(rng, split, direction, rng.choice((4, 4, 6))) if seen != "image" else []
    answers = [direction] * bool(scenes) + [_said(sound)]
    kind = rng.choice(("all", "all", "sound", "picture", "video"))
    if kind == "picture" and picture:
        turn = _names(rng, split, picture.things[0], NOUNS)
    elif kind == "video" and scenes:
        turn = ask(rng, split.name, "motion", _called(scenes[0].things[0]), CLIPS), direction
    elif kind == "sound":
        turn = ask(rng, split.name, sound.kind, nouns=RECORDINGS), sound.answer
    else:
        if picture:
            answers.insert(0, f"{picture.things[0].colour} {picture.things[0].shape}")
        turn = ask(rng, split.name, "all"), ", ".join(answers)
    order = MEDIA if split.name == "held_out" else tuple(rng.sample(MEDIA, 3))
    shown = (picture,) if picture else ()
    return Sample(
        "mixed", draw_all(shown), draw_all(scenes), (turn,), scenes=(*shown, *scenes), sounds=(sound,), order=order
    )


def talk(rng: random.Random, split: Split) -> Sample:
    """Return a line of small talk without media."""
    return Sample("chat", (), (), (chat(rng, split.name),))


def drill(rng: random.Random, split: Split) -> Sample:
    """Ask whether two words are equal, like `compare` without images. This task is used only in training."""
    words = rng.choice((list(COLOURS), list(SHAPES)))
    one = rng.choice(words)
    other = one if rng.random() < 0.5 else rng.choice([word for word in words if word != one])
    question = rng.choice(("Are {} and {} the same?", "Is {} the same as {}?", "{} and {}: the same?"))
    return Sample("drill", (), (), ((question.format(one, other), _verdict(one, other)),))


MAKERS: dict[str, Maker] = {
    **{kind: hearing(kind) for kind in HEARING},
    "mixed": mixed,
    "drill": drill,
    "name": name,
    "where": where,
    "count": count,
    "compare": compare,
    "motion": motion,
    "chat": talk,
}


def sample(rng: random.Random, split: Split, task: str) -> Sample:
    """Make a sample of a task. All randomness comes from `rng`."""
    sample = MAKERS[task](rng, split)
    if split.name == "held_out":
        return sample
    text_first = rng.random() < 0.15
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    return replace(sample, text_first=text_first, system=system)
