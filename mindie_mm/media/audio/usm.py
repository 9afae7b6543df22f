"""Log-mel spectrograms, equal to those of transformers' Gemma3nAudioFeatureExtractor and Gemma4AudioFeatureExtractor.

Source: Universal Speech Model, arXiv 2303.01037. The steps are silence before or after the clip, preemphasis within
each frame, Hann windows, magnitudes, mel filters and the natural logarithm.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.audio.encoded_audio import Samples

_NEEDED: Mapping[str, Any] = {
    "padding_value": 0.0,
    "dither": 0.0,
    "preemphasis_htk_flavor": True,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
_MULTIPLE = 128
"""A clip without silence before it is padded to a multiple of this number of samples."""
_CHUNK = 1024
"""Maximum number of frames that are computed at once."""


@dataclass(frozen=True, slots=True)
class UsmSettings:
    """Spectrogram settings of a checkpoint."""

    rate: int
    """Sampling rate in Hz."""
    num_bins: int
    """Number of mel bins per frame."""
    window: int
    """Length of the window in samples."""
    hop: int
    """Distance between frames in samples."""
    lowest: float
    """Frequency in Hz at which the first mel filter begins."""
    highest: float
    """Frequency in Hz at which the last mel filter ends."""
    scale: float
    """Number that samples are multiplied by."""
    floor: float
    """Number that is added before the logarithm if `semicausal`, and otherwise the minimum before the logarithm."""
    preemphasis: float
    """Factor of preemphasis: each sample is reduced by this share of the previous sample in the frame."""
    overdrive: bool
    """True if the Fourier transform is twice as long as the window needs."""
    semicausal: bool
    """True if half a window of silence precedes a clip. If False, silence pads it to a multiple of 128 samples."""
    max_samples: int
    """Maximum length of a clip in samples. The reference cuts longer clips off, but this package refuses them."""

    @classmethod
    def read(cls, config: Mapping[str, Any], max_samples: int, where: str, *, semicausal: bool) -> Self:
        """Read the configuration of a feature extractor. `where` is its name in error messages.

        The other arguments are fields that no configuration contains.

        Raises:
            UnsupportedCheckpoint: A setting is not supported.

        """
        for name, needed in _NEEDED.items():
            if config.get(name, needed) != needed:
                raise UnsupportedCheckpoint(f"{where}: {name} is {config[name]!r}; only {needed!r} is supported")
        rate = config.get("sampling_rate", 16_000)
        return cls(
            rate=rate,
            num_bins=config.get("feature_size", 128),
            window=round(rate * config.get("frame_length_ms", 20.0) / 1000),
            hop=round(rate * config.get("hop_length_ms", 10.0) / 1000),
            lowest=config.get("min_frequency", 0.0),
            highest=config.get("max_frequency", 8000.0),
            scale=config.get("input_scale_factor", 1.0),
            floor=config.get("mel_floor", 1e-3),
            preemphasis=config.get("preemphasis", 0.0),
            overdrive=config.get("fft_overdrive", False),
            semicausal=semicausal,
            max_samples=max_samples,
        )

    @property
    def least_samples(self) -> int:
        """Minimum length of a clip in samples, which has one frame."""
        before, least = self._silence(0)[0], self.window + 1
        return least - before if self.semicausal else (least - 1) // _MULTIPLE * _MULTIPLE + 1

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames that lie completely within a clip and the silence around it."""
        return max(0, (num_samples + sum(self._silence(num_samples)) - self.window - 1) // self.hop + 1)

    def padded(self, samples: Samples) -> Samples:
        """Return a clip with the silence around it."""
        return np.pad(samples, self._silence(len(samples)))

    def _silence(self, num_samples: int) -> tuple[int, int]:
        """Return the numbers of samples of silence before and after a clip."""
        return (self.window // 2, 0) if self.semicausal else (0, -num_samples % _MULTIPLE)


def write_usm(samples: Samples, settings: UsmSettings, out: NDArray[np.float32]) -> None:
    """Write the spectrogram of a clip.

    Args:
        samples: Samples at the rate of `settings`, float32 [samples].
        settings: Spectrogram settings.
        out: Output, float32 [frames, num_bins], for `settings.num_frames(len(samples))` frames.

    """
    if settings.scale != 1.0:
        samples = samples * settings.scale
    window, filters, length = _tables(settings)
    # The reference takes one sample more than a window and drops it, which decides the number of frames.
    frames = np.lib.stride_tricks.sliding_window_view(settings.padded(samples), settings.window + 1)
    frames = frames[:: settings.hop, :-1]
    for start in range(0, len(out), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(out)))
        emphasized = _emphasized(frames[part], settings.preemphasis)
        magnitude = np.abs(np.fft.rfft(emphasized * window, n=length, axis=-1)) @ filters
        floored = magnitude + settings.floor if settings.semicausal else np.maximum(magnitude, settings.floor)
        out[part] = np.log(floored)


def _emphasized(frames: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """Return frames, float32 [frames, window], with preemphasis within each frame, as in HTK."""
    if not factor:
        return frames
    return np.concatenate([frames[:, :1] * (1.0 - factor), frames[:, 1:] - factor * frames[:, :-1]], axis=1)


@cache
def _tables(settings: UsmSettings) -> tuple[NDArray[np.float32], NDArray[np.float64], int]:
    """Return the window, the mel filters [bins of the spectrum, num_bins], and the length of the Fourier transform."""
    from transformers.audio_utils import mel_filter_bank, window_function  # late: the import takes a second

    length = 2 ** (math.ceil(math.log2(settings.window)) + settings.overdrive)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the highest filters are narrower than a bin of the spectrum, hence empty
        filters = mel_filter_bank(
            num_frequency_bins=length // 2 + 1,
            num_mel_filters=settings.num_bins,
            min_frequency=settings.lowest,
            max_frequency=settings.highest,
            sampling_rate=settings.rate,
            norm=None,
            mel_scale="htk",
        )
    if settings.semicausal:
        return window_function(settings.window).astype(np.float32), filters, length
    places = np.arange(settings.window, dtype=np.float32)  # the reference computes this window in float32
    hann = 0.5 * (1 - np.cos(2 * np.pi * places / settings.window))
    return hann.astype(np.float32), filters, length
