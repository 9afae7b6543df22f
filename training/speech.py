"""Spoken digits from espeak-ng (`apt-get install espeak-ng`), with separate speakers for each split."""

from __future__ import annotations

import io
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import soundfile
import soxr

from tools.arguments import parser
from training.scenes import Split

RATE = 16_000
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029", "en-us-nyc")
VARIANTS = ("", "+m1", "+m2", "+m3", "+m4", "+m6", "+m7", "+m8", "+f1", "+f2", "+f4", "+f5", "+klatt", "+klatt3")
# Training uses neither the variant of these voices nor the accent of the second.
HELD_OUT_VOICES = ("en-us+f3", "en-gb-x-gbcwmd+m5")
SPEEDS = {0: tuple(range(110, 211, 10)), 1: tuple(range(115, 206, 10))}
"""Words per minute, by the split's parity."""
PITCHES = {0: tuple(range(20, 81, 10)), 1: tuple(range(25, 76, 10))}
"""Pitches on espeak-ng's scale from 0 to 99, by the split's parity."""
RECORDED = Path(__file__).parent / "spoken"
"""Each digit by each held-out voice, for machines without espeak-ng. `python -m training.speech` writes them."""
SILENCE = 0.01
TRAINING_SPEAKERS = 500


@dataclass(frozen=True, slots=True)
class Speaker:
    """Voice, speed and pitch of a spoken word."""

    voice: str
    speed: int
    pitch: int


def _drawn(rng: random.Random, voices: Sequence[str], parity: int) -> Speaker:
    return Speaker(rng.choice(voices), rng.choice(SPEEDS[parity]), rng.choice(PITCHES[parity]))


@cache
def _training_speakers() -> tuple[Speaker, ...]:
    """Return a fixed set of speakers, so that each word by each speaker is synthesized once and cached."""
    rng = random.Random(0)
    voices = [accent + variant for accent in ACCENTS for variant in VARIANTS]
    return tuple(_drawn(rng, voices, 0) for _ in range(TRAINING_SPEAKERS))


def speaker(rng: random.Random, split: Split) -> Speaker:
    """Choose a random speaker of the split."""
    if split.name == "held_out":
        return _drawn(rng, HELD_OUT_VOICES, 1)
    return rng.choice(_training_speakers())


@lru_cache(TRAINING_SPEAKERS * len(DIGITS))
def say(word: str, by: Speaker) -> np.ndarray:
    """Synthesize the word, float32 mono at 16 kHz without silence around it. Raise OSError without espeak-ng."""
    command = ["espeak-ng", "-v", by.voice, "-s", str(by.speed), "-p", str(by.pitch), "--stdout", word]
    spoken = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603 - `word` is one of DIGITS
    samples, rate = soundfile.read(io.BytesIO(spoken), dtype="float32")
    loud = np.flatnonzero(np.abs(samples) > SILENCE * np.abs(samples).max())
    return np.asarray(soxr.resample(samples[loud[0] : loud[-1] + 1], rate, RATE), np.float32)


def recorded(word: str, voice: str) -> Path:
    """Return the file of a digit by a held-out voice, a 16-bit FLAC at 16 kHz."""
    return RECORDED / f"{word}-{voice.replace('+', '-')}.flac"


def main() -> None:
    """Write the recordings at a held-out speed and pitch, with a fifth of a second of silence on either side."""
    RECORDED.mkdir(exist_ok=True)
    silence = np.zeros(RATE // 5, np.float32)
    for voice in HELD_OUT_VOICES:
        for word in DIGITS:
            spoken = np.concatenate([silence, say(word, Speaker(voice, 145, 45)), silence])
            soundfile.write(recorded(word, voice), spoken, RATE, subtype="PCM_16")


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
