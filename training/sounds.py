"""Sounds with a known truth: tones, rows of beeps and spoken digits, the two splits apart.

A sound is described first (`Sound`) and made afterwards. Speech comes from espeak-ng (`training.speech`).
The two splits share no pitch, no length of a beep or pause, no voice, no speed and no level of noise.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

import numpy as np

from training.scenes import Split
from training.speech import DIGITS, RATE, Speaker, say, speaker

PITCHES: dict[str, tuple[float, float]] = {"low": (110.0, 300.0), "middle": (500.0, 1100.0), "high": (1900.0, 4500.0)}
"""Hertz."""
MAX_BEEPS = 5
WAVES = ("sine", "triangle", "square", "organ")
# Half semitones: odd ones are held out.
STEPS_PER_OCTAVE = 24
LONGEST_S = 2.9

Wave = np.ndarray
Kind = Literal["tone", "beeps", "digit"]


@dataclass(frozen=True, slots=True)
class Sound:
    """A clip before it is made; times in seconds."""

    kind: Kind
    answer: str
    """"high", "3", "seven"."""
    seconds: float
    spans: tuple[tuple[float, float], ...]
    """Start and length of each tone or beep; of the digit the start and nothing."""
    hertz: float
    wave: str
    level: float
    """The peak, of 1.0."""
    noise: float
    """The noise's part of the peak."""
    noise_seed: int
    speaker: Speaker | None = None


def _hundredths(rng: random.Random, split: Split, low: float, high: float) -> float:
    """A length in whole hundredths: even ones in training, odd ones held out."""
    return (rng.randrange(round(low * 100), round(high * 100)) // 2 * 2 + split.parity) / 100


def _hertz(rng: random.Random, split: Split, low: float, high: float) -> float:
    while True:
        octaves = rng.uniform(math.log2(low), math.log2(high))
        if int(octaves * STEPS_PER_OCTAVE) % 2 == split.parity:
            return float(2.0**octaves)


def _level(rng: random.Random) -> float:
    return math.exp(rng.uniform(math.log(0.05), math.log(0.9)))


def _noise(rng: random.Random, split: Split) -> float:
    """None in half of the clips; else training and held-out levels take turns."""
    if rng.random() < 0.5:
        return 0.0
    return (rng.randrange(0, 12) * 2 + 1 + split.parity) / 1000


def tone(rng: random.Random, split: Split) -> Sound:
    """One long tone that is plainly high, middle or low."""
    name = rng.choice(list(PITCHES))
    lead, length, tail = rng.uniform(0.0, 0.4), _hundredths(rng, split, 0.3, 1.5), rng.uniform(0.0, 0.4)
    hertz = _hertz(rng, split, *PITCHES[name])
    return Sound(
        "tone", name, max(0.4, lead + length + tail), ((lead, length),), hertz, rng.choice(WAVES), _level(rng),
        _noise(rng, split), rng.randrange(1 << 30),
    )  # fmt: skip


def beeps(rng: random.Random, split: Split) -> Sound:
    """One to five short beeps at an even pace."""
    number = rng.randint(1, MAX_BEEPS)
    length, pause = _hundredths(rng, split, 0.08, 0.2), _hundredths(rng, split, 0.12, 0.3)
    at = rng.uniform(0.0, 0.3)  # not in hundredths: else no beep would begin where the model's steps of 20 ms do
    spans = tuple((at + i * (length + pause), length) for i in range(number))
    seconds = min(LONGEST_S, spans[-1][0] + length + rng.uniform(0.1, 0.5))
    return Sound(
        "beeps", str(number), seconds, spans, _hertz(rng, split, 300.0, 3000.0), rng.choice(WAVES), _level(rng),
        _noise(rng, split), rng.randrange(1 << 30),
    )  # fmt: skip


def digit(rng: random.Random, split: Split) -> Sound:
    """One spoken digit."""
    word = rng.choice(DIGITS)
    lead, tail = rng.uniform(0.02, 0.4), rng.uniform(0.05, 0.4)
    # The word's own length is not known before it is said: `seconds` is what stands round it.
    return Sound(
        "digit", word, lead + tail, ((lead, 0.0),), 0.0, "", _level(rng), _noise(rng, split) / 2,
        rng.randrange(1 << 30), speaker(rng, split),
    )  # fmt: skip


SOUNDS = {"tone": tone, "beeps": beeps, "digit": digit}


def _periodic(wave: str, turns: Wave) -> Wave:
    """One sample for each phase in whole turns."""
    sine = np.sin(2 * np.pi * turns)
    if wave == "triangle":
        return np.asarray(np.arcsin(sine) * (2 / np.pi))
    if wave == "square":
        return np.tanh(4 * sine)
    if wave == "organ":
        return sine + 0.4 * np.sin(4 * np.pi * turns) + 0.2 * np.sin(6 * np.pi * turns)
    return sine


def _played(sound: Sound) -> Wave:
    samples = np.zeros(round(sound.seconds * RATE))
    for start, length in sound.spans:
        first, number = round(start * RATE), round(length * RATE)
        ramp = np.minimum(1.0, np.arange(number) / (0.01 * RATE))
        note = _periodic(sound.wave, np.arange(number) * (sound.hertz / RATE)) * ramp * ramp[::-1]
        room = samples[first : first + number]
        room += note[: len(room)]
    return samples


def make(sound: Sound) -> tuple[Wave, tuple[tuple[float, float], ...]]:
    """The clip, float32 mono at 16 kHz within -1..1, and when it sounds: (start, length) in seconds."""
    if sound.speaker is None:
        samples, spans = _played(sound), sound.spans
    else:
        word = say(sound.answer, sound.speaker)
        ((lead, _),) = sound.spans
        before, around = round(lead * RATE), round(sound.seconds * RATE)
        samples = np.concatenate([np.zeros(before), word, np.zeros(max(0, around - before))])
        spans = ((lead, len(word) / RATE),)
    samples = samples / max(1e-6, float(np.abs(samples).max()))
    if sound.noise:
        samples = samples + np.random.default_rng(sound.noise_seed).normal(0.0, sound.noise, len(samples))
    return np.clip(samples * sound.level, -1.0, 1.0).astype(np.float32), spans
