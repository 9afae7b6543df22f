"""Log-mel spectrograms, equal to those of the torch implementation in transformers' WhisperFeatureExtractor.

The steps follow Whisper (arXiv 2212.04356, section 2.2): Hann windows, power, mel filters, log10, clamping to at
least the maximum of the clip minus 8, and (x + 4) / 4. Some feature extractors pad each clip with silence to 30 s or
more. This module computes only the part of the silence that the caller requests.

A long clip is transformed in pieces, so that intermediate results take no more memory than those of a short clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.audio.encoded_audio import Samples

_FLOOR = 1e-10
_RANGE = 8.0
_MAX_FREQUENCY = 8000.0
_PIECE = 3000
"""Number of frames that are transformed at a time."""


@dataclass(frozen=True, slots=True)
class MelSettings:
    """Spectrogram settings of a checkpoint."""

    rate: int
    """Sampling rate in Hz."""
    num_bins: int
    """Number of mel bins per frame."""
    window: int
    """Length of the window in samples."""
    hop: int
    """Distance between frames in samples."""
    max_samples: int
    """Maximum length of a clip in samples. References cut longer clips off, but this package refuses them."""
    pads: bool = True
    """True if the reference pads clips with silence to `max_samples`. Otherwise, it mirrors a clip at its end and drops
    an incomplete frame."""
    min_samples: int = 0
    """Length in samples. Shorter clips are padded with silence."""

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> MelSettings:
        """Read the configuration of a feature extractor. `where` is its name in error messages.

        Raises:
            UnsupportedCheckpoint: A setting is not supported.

        """
        for name, needed in (("padding_value", 0.0), ("dither", 0.0)):
            if config.get(name, needed) != needed:
                raise UnsupportedCheckpoint(f"{where}: {name} is {config[name]!r}; only {needed!r} is supported")
        rate = config.get("sampling_rate", 16_000)
        return cls(
            rate=rate,
            num_bins=config.get("feature_size", 80),
            window=config.get("n_fft", 400),
            hop=config.get("hop_length", 160),
            max_samples=config.get("chunk_length", 30) * rate,
            min_samples=config.get("min_length", 0),
        )

    @property
    def max_frames(self) -> int:
        """Number of frames in a clip of maximum length."""
        return self.max_samples // self.hop

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of a clip of `num_samples` samples, at most `max_frames`."""
        num_samples = max(num_samples, self.min_samples)
        return min(math.ceil(num_samples / self.hop) if self.pads else num_samples // self.hop, self.max_frames)

    def least_samples(self, num_frames: int) -> int:
        """Return the minimum length in samples of a clip of `num_frames` frames."""
        return (num_frames - 1) * self.hop + 1 if self.pads else num_frames * self.hop


def write_log_mel(samples: Samples, settings: MelSettings, out: NDArray[np.float32]) -> None:
    """Write the spectrogram of a clip.

    Args:
        samples: Samples at the rate of `settings`, float32 [samples].
        settings: Spectrogram settings.
        out: Output, float32 [num_bins, frames]. The number of frames is at least `settings.num_frames(len(samples))`
            and at most `settings.max_frames`. Frames after the end of the clip contain silence.

    """
    samples = samples[: settings.max_samples]
    num_frames, hop = out.shape[1], settings.hop
    assert settings.num_frames(len(samples)) <= num_frames <= settings.max_frames, (len(samples), out.shape)
    length = max(len(samples), settings.min_samples)
    if settings.pads:  # with enough silence that the last frames do not depend on the length of the silence
        length = min(max(length, num_frames * hop) + 2 * settings.window, settings.max_samples)
    padded = torch.zeros(length)
    padded[: len(samples)] = torch.from_numpy(samples.copy() if not samples.flags.writeable else samples)
    padded = F.pad(padded[None], (settings.window // 2,) * 2, mode="reflect")[0]
    written, total = torch.from_numpy(out), length // hop
    highest = torch.tensor(-torch.inf)  # the maximum of all frames, including frames that are not requested
    for start in range(0, total, _PIECE):
        stop = min(start + _PIECE, total)
        logarithm = _log_mel(padded[start * hop : (stop - 1) * hop + settings.window], settings)
        highest = torch.maximum(highest, logarithm.max())
        written[:, start:stop].copy_(logarithm[:, : max(num_frames - start, 0)])
    written.clamp_(min=highest - _RANGE).add_(4.0).div_(4.0)


def _log_mel(samples: Tensor, settings: MelSettings) -> Tensor:
    """Return the logarithms of the mel bins of all complete windows, float32 [num_bins, windows]."""
    window = torch.hann_window(settings.window)
    spectrum = torch.stft(samples, settings.window, settings.hop, window=window, center=False, return_complex=True)
    # transposed to torch's memory layout, without a copy
    real, imaginary = torch.view_as_real(spectrum.T).unbind(-1)
    power = real.square().addcmul_(imaginary, imaginary)
    return (_filters(settings.rate, settings.num_bins, settings.window) @ power.T).clamp_(min=_FLOOR).log10_()


@cache
def _filters(rate: int, num_bins: int, window: int) -> Tensor:
    """Return the filters of Slaney's Auditory Toolbox, float32 [num_bins, 1 + window // 2]."""
    from transformers.audio_utils import mel_filter_bank  # late: the import takes a second, and few prompts need it

    filters = mel_filter_bank(
        num_frequency_bins=1 + window // 2,
        num_mel_filters=num_bins,
        min_frequency=0.0,
        max_frequency=_MAX_FREQUENCY,
        sampling_rate=rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters).to(torch.float32).T.contiguous()
