"""Sounds with known contents: tones, series of beeps and spoken digits.

A sound is described first (`Sound`) and synthesized afterwards. Speech comes from espeak-ng (`training.speech`).
The two splits do not share any pitches, beep or pause lengths, voices, speeds or noise levels.
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
"""Lowest and highest frequency of each pitch, in hertz."""
MAX_BEEPS = 5
WAVES = ("sine", "triangle", "square", "organ")
# Half semitones. Odd steps are held out.
STEPS_PER_OCTAVE = 24
LONGEST_S = 2.9

Wave = np.ndarray
Kind = Literal["tone", "beeps", "digit"]


@dataclass(frozen=True, slots=True)
class Sound:
    """Description of a clip. Times are in seconds."""

    kind: Kind
    answer: str
    """Such as "high", "3" or "seven"."""
    seconds: float
    spans: tuple[tuple[float, float], ...]
    """Start and length of each tone or beep. A digit has a start and length 0."""
    hertz: float
    wave: str
    level: float
    """Peak amplitude, at most 1.0."""
    noise: float
    """Noise as a fraction of the peak."""
    noise_seed: int
    speaker: Speaker | None = None


def _hundredths(rng: random.Random, split: Split, low: float, high: float) -> float:
    """Draw a length in whole hundredths: even for training, odd for the held-out split."""
    return (rng.randrange(round(low * 100), round(high * 100)) // 2 * 2 + split.parity) / 100


def _hertz(rng: random.Random, split: Split, low: float, high: float) -> float:
    while True:
        octaves = rng.uniform(math.log2(low), math.log2(high))
        if int(octaves * STEPS_PER_OCTAVE) % 2 == split.parity:
            return float(2.0**octaves)


def _level(rng: random.Random) -> float:
    return math.exp(rng.uniform(math.log(0.05), math.log(0.9)))


def _noise(rng: random.Random, split: Split) -> float:
    """Draw a noise level: 0 in half of the clips, otherwise one of the split's alternating levels."""
    if rng.random() < 0.5:
        return 0.0
    return (rng.randrange(0, 12) * 2 + 1 + split.parity) / 1000


def tone(rng: random.Random, split: Split) -> Sound:
    """Describe one long tone that is clearly high, middle or low."""
    name = rng.choice(list(PITCHES))
    lead, length, tail = rng.uniform(0.0, 0.4), _hundredths(rng, split, 0.3, 1.5), rng.uniform(0.0, 0.4)
    hertz = _hertz(rng, split, *PITCHES[name])
    return Sound(
        "tone", name, max(0.4, lead + length + tail), ((lead, length),), hertz, rng.choice(WAVES), _level(rng),
        _noise(rng, split), rng.randrange(1 << 30),
    )  # fmt: skip


def beeps(rng: random.Random, split: Split) -> Sound:
    """Describe one to five short beeps at a constant rate."""
    number = rng.randint(1, MAX_BEEPS)
    length, pause = _hundredths(rng, split, 0.08, 0.2), _hundredths(rng, split, 0.12, 0.3)
    at = rng.uniform(0.0, 0.3)  # not in hundredths, so that beeps start at any offset from the model's 20 ms steps
    spans = tuple((at + i * (length + pause), length) for i in range(number))
    seconds = min(LONGEST_S, spans[-1][0] + length + rng.uniform(0.1, 0.5))
    return Sound(
        "beeps", str(number), seconds, spans, _hertz(rng, split, 300.0, 3000.0), rng.choice(WAVES), _level(rng),
        _noise(rng, split), rng.randrange(1 << 30),
    )  # fmt: skip


def digit(rng: random.Random, split: Split) -> Sound:
    """Describe one spoken digit."""
    word = rng.choice(DIGITS)
    lead, tail = rng.uniform(0.02, 0.4), rng.uniform(0.05, 0.4)
    # The length of the word is unknown before synthesis, so `seconds` is the silence around it.
    return Sound(
        "digit", word, lead + tail, ((lead, 0.0),), 0.0, "", _level(rng), _noise(rng, split) / 2,
        rng.randrange(1 << 30), speaker(rng, split),
    )  # fmt: skip


SOUNDS = {"tone": tone, "beeps": beeps, "digit": digit}


def _periodic(wave: str, turns: Wave) -> Wave:
    """Return one sample per phase. A phase of 1 is a whole turn."""
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
    """Synthesize the clip, float32 mono at 16 kHz within -1..1. Also return its (start, length) spans in seconds."""
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
