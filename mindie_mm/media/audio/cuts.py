"""Places at which long speech is cut into clips."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPEECH_RATE = 16_000
"""Sampling rate in Hz of speech that is cut. All audio towers expect this rate."""
SAMPLES = "samples"
"""Name of the array with the samples of speech that is cut, int16 [samples]."""
_STEP = SPEECH_RATE // 50
"""Number of samples in a measurement of loudness: 20 ms."""
_PAUSE = 10
"""Number of steps of a pause. A cut is in the middle of these 0.2 s."""
_HALF = _STEP * _PAUSE // 2
_LEAST_S = 1.0
"""Minimum length in seconds of a clip."""
_AS_QUIET = 1.5
"""Maximum loudness of a pause, divided by that of the quietest one. The last of these pauses is chosen."""
_COMPARABLE = 30.0
"""Factor by which a pause in the second half of a window may be louder than one in the first half: 15 dB."""
_SILENT = 1.0
"""Power of silence, with rounding of the samples."""


def cuts(samples: NDArray[np.int16], window_s: float) -> list[int]:
    """Return the samples at which clips begin, except the first. Each clip lasts at most `window_s`.

    Each cut is in the last of the quietest pauses of the second half of a window, or of the whole window if the second
    half has no comparable pause. The clips do not overlap, so that no word is heard twice.

    Args:
        samples: Speech at `SPEECH_RATE`, int16 [samples].
        window_s: Maximum length of a clip in seconds. The minimum is 2.

    """
    window, least = int(window_s * SPEECH_RATE), int(_LEAST_S * SPEECH_RATE)
    starts: list[int] = []
    start = 0
    while len(samples) - start > window:
        first, last = start + least, min(start + window, len(samples) - least)
        loudness = _loudness(samples[first - _HALF : last + _HALF])
        second_half = min((window // 2 - least) // _STEP, len(loudness) - 1)
        start = first + _STEP * _last_quiet(loudness, second_half)
        starts.append(start)
    return starts


def _loudness(samples: NDArray[np.int16]) -> NDArray[np.float64]:
    """Return the mean power of each stretch of `_PAUSE` steps, at least one. Stretches begin one step apart."""
    steps = samples[: len(samples) // _STEP * _STEP].reshape(-1, _STEP).astype(np.float64)
    power = np.square(steps).mean(axis=1)
    return np.convolve(power, np.full(_PAUSE, 1 / _PAUSE), "valid")


def _last_quiet(loudness: NDArray[np.float64], second_half: int) -> int:
    """Return the index of the last quiet stretch from `second_half` on.

    If that half is much louder than the whole, return the last quiet stretch of the whole.
    """
    late = loudness[second_half:].min()
    limit = _AS_QUIET * (late if late <= _COMPARABLE * loudness.min() + _SILENT else loudness.min()) + _SILENT
    return int(np.flatnonzero(loudness <= limit)[-1])
