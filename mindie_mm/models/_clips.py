"""Log-mel spectrograms of audio clips, shared by several families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindie_mm.errors import MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Plan, Processor, Spelling, Write
from mindie_mm.shm import ArraySpec

SPECTROGRAM = "input_features"
"""Name of the array in the block of a clip, float32 [bins, frames]."""
LEAST_FRAMES = 3
"""Minimum number of frames of a clip, for which there is one feature."""


def num_features_of(num_frames: int) -> int:
    """Return the number of features of a clip.

    The second convolution halves the number of frames, and the pooling after the encoder halves it again.
    """
    return encoder_length(num_frames) // 2


def read_mel(checkpoint: Checkpoint, tower: Any) -> MelSettings:
    """Return the settings of the spectrograms that the audio tower expects.

    Args:
        checkpoint: The checkpoint.
        tower: Section of config.json for the audio tower.

    Raises:
        UnsupportedCheckpoint: The preprocessor does not fit the tower.

    """
    where = f"{checkpoint.path} (audio)"
    settings = checkpoint.preprocessor("audio", {"WhisperFeatureExtractor": {"feature_size": 80}})
    check_settings(settings, {"feature_size": tower.num_mel_bins}, where)
    return MelSettings.read(settings, where)


def plan_audio(media: Media, data: Data, settings: MelSettings, further_frames: int = 0) -> tuple[Plan, Write]:
    """Return the plan of an audio clip. Its grid is (frames,).

    Args:
        media: The media item.
        data: Source of the clip, encoded or as samples.
        settings: Settings of the spectrogram.
        further_frames: Number of silent frames that are stored after the frames of the clip.

    Raises:
        InputError: The options state a sampling rate for an encoded clip.
        LimitExceeded: The clip is too long.
        MediaError: The clip cannot be decoded, or it is too short.

    """
    samples = open_audio(data, media.options.sampling_rate).decode(settings.rate, settings.max_samples)
    num_frames = settings.num_frames(len(samples))
    if num_frames < LEAST_FRAMES:
        least = (LEAST_FRAMES - 1) * settings.hop + 1
        raise MediaError(
            f"the audio clip has {len(samples)} samples at {settings.rate} Hz; it must have at least {least}"
        )
    specs = clip_specs(settings, (num_frames,), further_frames)

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        write_log_mel(samples, settings, arrays[SPECTROGRAM])

    plan = Plan(
        num_features=num_features_of(num_frames),
        specs=specs,
        settings=f"sound of {media.options.sampling_rate}, {settings}, {specs[SPECTROGRAM].shape[1]} frames",
        grid=(num_frames,),
    )
    return plan, write


def clip_specs(settings: MelSettings, grid: tuple[int, ...], further_frames: int = 0) -> dict[str, ArraySpec]:
    """Return `Processor.specs_of` for a clip. `plan_audio` describes the other arguments."""
    if not grid:
        return {}
    stored = min(grid[0] + further_frames, settings.max_frames)
    return {SPECTROGRAM: ArraySpec((settings.num_bins, stored), "float32")}


def spell_clip(processor: Processor, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
    """Return `Processor.spelling` for a clip. The grid may be empty if the number of frames is unknown."""
    is_possible = num_features <= processor.max_tokens("audio")
    if grid:
        is_possible &= len(grid) == 1 and grid[0] >= LEAST_FRAMES and num_features_of(grid[0]) == num_features
    return Spelling() if is_possible else None


def encoder_length(num_frames: int) -> int:
    """Return the number of encoder positions of a clip with `num_frames` frames."""
    return (num_frames - 1) // 2 + 1
