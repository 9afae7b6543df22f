"""Places at which long speech is cut into clips."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPEECH_RATE = 16_000
"""Sampling rate in Hz of speech that is cut. All audio towers expect this rate."""
SAMPLES = "samples"
"""Name of the array with the samples of speech that is cut, int16 [samples]."""
_STEP = SPEECH_RATE // 50
"""Number of samples of which the loudness is measured: 20 ms."""
_PAUSE = 10
"""Number of steps of a pause. A cut is in the middle of these 0.2 s."""
_LEAST_S = 1.0
"""Minimum length in seconds of a clip."""
_AS_QUIET = 1.5
"""Factor by which a pause may be louder than the quietest one. The last of these pauses is chosen."""


def cuts(samples: NDArray[np.int16], window_s: float) -> list[int]:
    """Return the samples at which clips begin, except the first. Each clip lasts at most `window_s`.

    Each cut is in the last of the quietest pauses of the second half of a window. The clips do not overlap, so that no
    word is heard twice.

    Args:
        samples: Speech at `SPEECH_RATE`, int16 [samples].
        window_s: Maximum length of a clip in seconds. The minimum is 2.

    """
    window, least = int(window_s * SPEECH_RATE), int(_LEAST_S * SPEECH_RATE)
    starts: list[int] = []
    start = 0
    while len(samples) - start > window:
        first, last = start + window // 2, min(start + window, len(samples) - least)
        quiet = _loudness(samples[first : last + 1])
        start = first if not len(quiet) else first + _STEP * (_last_quiet(quiet) + _PAUSE // 2)
        starts.append(start)
    return starts


def _loudness(samples: NDArray[np.int16]) -> NDArray[np.float64]:
    """Return the mean power of each stretch of `_PAUSE` steps. Consecutive stretches are one step apart."""
    steps = samples[: len(samples) // _STEP * _STEP].reshape(-1, _STEP).astype(np.float64)
    power = np.square(steps).mean(axis=1)
    return np.convolve(power, np.full(_PAUSE, 1 / _PAUSE), "valid") if len(power) >= _PAUSE else power[:0]


def _last_quiet(loudness: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(loudness <= _AS_QUIET * loudness.min() + 1.0)[-1])
