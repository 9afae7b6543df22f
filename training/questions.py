"""One phrasing of a question, drawn by chance, with the words for the medium and the thing."""

from __future__ import annotations

import random

from training.phrasings import QUESTIONS, Phrasings
from training.scenes import SplitName
from training.small_talk import CHAT, CHAT_ANSWERS

NOUNS = ("image", "picture", "photo")
CLIPS = ("video", "clip")
RECORDINGS = ("audio", "recording", "sound")


def plural(noun: str) -> str:
    """The plural of a shape or of "shape" and "object"."""
    return noun + ("es" if noun.endswith("ss") else "s")


def templates(split: SplitName, phrasings: Phrasings) -> tuple[str, ...]:
    """The split's half of the templates."""
    return phrasings.train if split == "train" else phrasings.held_out


def ask(
    rng: random.Random,
    split: SplitName,
    kind: str,
    names: tuple[str, ...] = ("shape", "object"),
    nouns: tuple[str, ...] = NOUNS,
) -> str:
    """One phrasing of a question. `names` are what the thing in question may be called."""
    template = rng.choice(templates(split, QUESTIONS[kind]))
    name = rng.choice(names)
    text = template.format(n=rng.choice(nouns), t=name, p=plural(name))
    return careless(rng, text) if split == "train" else text


def chat(rng: random.Random, split: SplitName) -> tuple[str, str]:
    """A line of small talk and its reply."""
    kind = rng.choice(list(CHAT))
    line = rng.choice(templates(split, CHAT[kind]))
    return (careless(rng, line) if split == "train" else line), CHAT_ANSWERS[kind]


def careless(rng: random.Random, text: str) -> str:
    """The text as a hasty hand types it: no capital, no final stop, at times a courtesy."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1 and text[-1] in "?.!":
        text = text[:-1]
    if rng.random() < 0.05:
        text += rng.choice((" Answer briefly.", " Answer in one word.", " Please be short."))
    return text
