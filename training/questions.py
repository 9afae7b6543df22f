"""Random phrasings of a question, with varying nouns for the medium ("image", "photo") and the shape or object."""

from __future__ import annotations

import random

from training.phrasings import QUESTIONS, Phrasings
from training.scenes import SplitName
from training.small_talk import CHAT, CHAT_ANSWERS

NOUNS = ("image", "picture", "photo")
CLIPS = ("video", "clip")
RECORDINGS = ("audio", "recording", "sound")


def plural(noun: str) -> str:
    """Return the plural of a shape, or of "shape" or "object"."""
    return noun + ("es" if noun.endswith("ss") else "s")


def templates(split: SplitName, phrasings: Phrasings) -> tuple[str, ...]:
    """Return the templates of the split."""
    return phrasings.train if split == "train" else phrasings.held_out


def ask(
    rng: random.Random,
    split: SplitName,
    kind: str,
    names: tuple[str, ...] = ("shape", "object"),
    nouns: tuple[str, ...] = NOUNS,
) -> str:
    """Phrase a question at random. `names` are the possible nouns for the object in the question."""
    template = rng.choice(templates(split, QUESTIONS[kind]))
    name = rng.choice(names)
    text = template.format(n=rng.choice(nouns), t=name, p=plural(name))
    return careless(rng, text) if split == "train" else text


def chat(rng: random.Random, split: SplitName) -> tuple[str, str]:
    """Return a line of small talk and its reply."""
    kind = rng.choice(list(CHAT))
    line = rng.choice(templates(split, CHAT[kind]))
    return (careless(rng, line) if split == "train" else line), CHAT_ANSWERS[kind]


def careless(rng: random.Random, text: str) -> str:
    """Make the text look hastily typed: drop a capital or the final punctuation, or append a request to be brief."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1 and text[-1] in "?.!":
        text = text[:-1]
    if rng.random() < 0.05:
        text += rng.choice((" Answer briefly.", " Answer in one word.", " Please be short."))
    return text
