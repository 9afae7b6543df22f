"""Log-mel filter banks, equal to those of transformers' Phi4MultimodalFeatureExtractor.

The steps are pre-emphasis, Hamming windows, power, mel filters with triangles in mel space as in Kaldi, and the natural
logarithm. Windows lie completely within the clip. A long clip is transformed in pieces, so that intermediate results
take no more memory than those of a short clip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.audio.encoded_audio import Samples

_SCALE = 32768
"""Factor that converts samples in [-1, 1] to the range of 16-bit integers."""
_PIECE = 3000
"""Number of frames that are transformed at a time."""


@dataclass(frozen=True, slots=True)
class FbankSettings:
    """Filter bank settings of a checkpoint."""

    rate: int
    """Sampling rate in Hz."""
    num_bins: int
    """Number of mel bins per frame."""
    window: int
    """Length of the window in samples."""
    hop: int
    """Distance between frames in samples."""
    fft: int
    """Length of the Fourier transform in samples."""
    preemphasis: float
    """Fraction of the previous sample that is subtracted from each sample."""
    lowest: float
    """Frequency in Hz at which the first mel filter begins."""
    highest: float
    """Frequency in Hz at which the last mel filter ends."""

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Self:
        """Read the configuration of a feature extractor. `where` is its name in error messages.

        Raises:
            UnsupportedCheckpoint: A setting is not supported.

        """
        if (padding := config.get("padding_value", 0.0)) != 0.0:
            raise UnsupportedCheckpoint(f"{where}: padding_value is {padding!r}; only 0.0 is supported")
        return cls(
            rate=config.get("sampling_rate", 16_000),
            num_bins=config.get("feature_size", 80),
            window=config.get("win_length", 400),
            hop=config.get("hop_length", 160),
            fft=config.get("n_fft", 512),
            preemphasis=config.get("preemphasis", 0.97),
            lowest=config.get("mel_min_frequency", 0),
            highest=config.get("mel_max_frequency", 7690),
        )

    def num_frames(self, num_samples: int) -> int:
        """Return the number of windows that lie completely within a clip of `num_samples` samples."""
        return max(0, (num_samples - self.window) // self.hop + 1)

    def num_samples(self, num_frames: int) -> int:
        """Return the minimum length in samples of a clip of `num_frames` frames."""
        return (num_frames - 1) * self.hop + self.window


def write_fbank(samples: Samples, settings: FbankSettings, out: NDArray[np.float32]) -> None:
    """Write the filter banks of a clip.

    Args:
        samples: Samples at the rate of `settings`, float32 [samples].
        settings: Filter bank settings.
        out: Output, float32 [frames, num_bins], for `settings.num_frames(len(samples))` frames.

    """
    owned = torch.from_numpy(samples if samples.flags.writeable else samples.copy())
    frames, written = owned.unfold(0, settings.window, settings.hop), torch.from_numpy(out)
    for start in range(0, len(frames), _PIECE):
        written[start : start + _PIECE].copy_(_log_mel(frames[start : start + _PIECE], settings))


def _log_mel(frames: Tensor, settings: FbankSettings) -> Tensor:
    """Return the logarithms of the mel bins of windows [frames, window], float32 [frames, num_bins]."""
    window, filters = _tables(settings)
    previous = frames.roll(1, -1)
    previous[:, 0] = previous[:, 1]
    emphasized = (frames - settings.preemphasis * previous) * _SCALE
    spectrum = torch.fft.rfft(window * emphasized, n=settings.fft).to(torch.complex64)  # computed in float64
    banks: Tensor = (spectrum.abs().square() @ filters).clamp_(min=1.0).log_()
    return banks


@cache
def _tables(settings: FbankSettings) -> tuple[Tensor, Tensor]:
    """Return the window, float64 [window], and the mel filters, float32 [bins of the spectrum, num_bins]."""
    from transformers.audio_utils import mel_filter_bank  # late: the import takes a second, and few prompts need it

    filters = mel_filter_bank(
        num_frequency_bins=settings.fft // 2 + 1,
        num_mel_filters=settings.num_bins,
        min_frequency=settings.lowest,
        max_frequency=settings.highest,
        sampling_rate=settings.rate,
        triangularize_in_mel_space=True,
        mel_scale="kaldi",
    )
    window = torch.hamming_window(settings.window, periodic=False, dtype=torch.float64)
    return window, torch.from_numpy(filters).to(torch.float32)
