"""Tests that sounds are reproducible and match their descriptions. Training and held-out sounds are separate."""

import math
import random

import numpy as np
import pytest
import soundfile

from training.samples import HEARING, sample
from training.scenes import HELD_OUT, TRAIN, Split
from training.sounds import PITCHES, SOUNDS, STEPS_PER_OCTAVE, Sound, make
from training.speech import ACCENTS, DIGITS, HELD_OUT_VOICES, RATE, VARIANTS, recorded, speaker

SPLITS = pytest.mark.parametrize("split", [TRAIN, HELD_OUT], ids=lambda split: split.name)


def drawn(kind: str, split: Split, number: int) -> list[Sound]:
    rng = random.Random(7)
    return [SOUNDS[kind](rng, split) for _ in range(number)]


def bursts(samples: np.ndarray) -> int:
    """Return how often the sound becomes loud after at least 40 ms of quiet."""
    loud = np.abs(samples) > 0.2 * np.abs(samples).max()
    at = np.flatnonzero(loud)
    return 1 + int((np.diff(at) > 0.04 * RATE).sum())


@SPLITS
def test_the_loudest_frequency_is_that_of_the_tone(split: Split) -> None:
    for sound in drawn("tone", split, 30):
        samples, _ = make(sound)
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
        hertz = spectrum.argmax() * RATE / len(samples)
        assert hertz == pytest.approx(sound.hertz, rel=0.05)
        low, high = PITCHES[sound.answer]
        assert low <= sound.hertz <= high


@SPLITS
def test_the_number_of_beeps_is_as_described(split: Split) -> None:
    for sound in drawn("beeps", split, 30):
        samples, spans = make(sound)
        assert bursts(samples) == len(spans) == int(sound.answer)


@SPLITS
def test_pitches_and_lengths_keep_to_their_split(split: Split) -> None:
    for sound in (*drawn("tone", split, 40), *drawn("beeps", split, 40)):
        assert int(math.log2(sound.hertz) * STEPS_PER_OCTAVE) % 2 == split.parity
        assert {round(length * 100) % 2 for _, length in sound.spans} == {split.parity}


def test_no_voice_speed_or_pitch_is_in_both_splits() -> None:
    rng = random.Random(2)
    known, strange = ([speaker(rng, split) for _ in range(300)] for split in (TRAIN, HELD_OUT))
    assert not {one.voice for one in known} & set(HELD_OUT_VOICES)
    assert {one.voice for one in strange} == set(HELD_OUT_VOICES)
    assert not {one.speed for one in known} & {one.speed for one in strange}
    assert not {one.pitch for one in known} & {one.pitch for one in strange}
    variants = {f"+{voice.partition('+')[2]}" for voice in HELD_OUT_VOICES}
    assert not variants & set(VARIANTS)
    assert {voice.partition("+")[0] for voice in HELD_OUT_VOICES} - set(ACCENTS), "one accent is new, too"


@pytest.mark.parametrize("kind", HEARING)
def test_a_seed_gives_the_same_sound(kind: str) -> None:
    first, second = (sample(random.Random(11), TRAIN, kind) for _ in range(2))
    assert first == second
    if first.sounds[0].speaker is None:  # without espeak-ng, there is no speech
        assert make(first.sounds[0])[0].tobytes() == make(second.sounds[0])[0].tobytes()


@SPLITS
def test_clips_are_within_bounds(split: Split) -> None:
    for kind in ("tone", "beeps"):
        for sound in drawn(kind, split, 40):
            samples, _ = make(sound)
            assert samples.dtype == np.float32
            assert 0.03 < np.abs(samples).max() <= 1.0
            assert 0.2 * RATE <= len(samples) <= 3.0 * RATE


def test_every_digit_is_recorded_by_every_held_out_voice() -> None:
    for voice in HELD_OUT_VOICES:
        for word in DIGITS:
            samples, rate = soundfile.read(recorded(word, voice))
            assert rate == RATE
            middle = samples[RATE // 5 : -RATE // 5]
            assert 0.2 * RATE < len(middle) < 1.2 * RATE
            assert not samples[: RATE // 5].any()
            assert not samples[-RATE // 5 :].any()
            for end in (middle[: RATE // 50], middle[-RATE // 50 :]):  # there is no silence besides 0.2 s at each end
                assert np.abs(end).max() > 0.005 * np.abs(middle).max()
