"""Log-mel spectrograms of audio clips, and the processor of families that take only audio clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import MediaError
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Plan, Processor, Spelling, Write
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.speech import WINDOW_S, SpeechTraits
from mindie_mm.nn.staging import to_device
from mindie_mm.shm import ArraySpec

SPECTROGRAM = "input_features"
"""Name of the array in the block of a clip, float32 [bins, frames]."""


def encoder_length(num_frames: int) -> int:
    """Return the number of positions after a convolution that halves the number of frames, rounded up."""
    return (num_frames - 1) // 2 + 1


def pooled_length(num_frames: int) -> int:
    """Return the number of features of a clip whose frames are halved by a convolution, and again by pooling."""
    return encoder_length(num_frames) // 2


@dataclass(frozen=True, slots=True)
class Clips:
    """Arrays and placeholders of a family's audio clips. The grid of a clip is (frames,)."""

    mel: MelSettings
    """Settings of the spectrograms."""
    num_features: Callable[[int], int] = pooled_length
    """Function from the number of frames of a clip to its number of features."""
    least_frames: int = 3
    """Minimum number of frames of a clip."""
    further_frames: int = 0
    """Number of silent frames that are stored after the frames of the clip."""
    chunk: int = 1
    """The length of transformers' spectrogram in frames is a multiple of this number, or `max_frames`."""

    @property
    def window_s(self) -> float:
        """Maximum length in seconds of the clips into which speech is cut."""
        return min(self.mel.max_samples / self.mel.rate, WINDOW_S)

    @property
    def max_tokens(self) -> int:
        """Maximum number of features of a clip."""
        return self.num_features(self.mel.max_frames)

    def worst_case(self) -> Data:
        """Return the samples of a clip of maximum length."""
        return np.zeros(self.mel.max_samples, np.float32)

    def plan(self, media: Media, data: Data) -> tuple[Plan, Write]:
        """Return the plan of an audio clip.

        Raises:
            InputError: The options state a sampling rate for an encoded clip.
            LimitExceeded: The clip is too long.
            MediaError: The clip cannot be decoded, or it is too short.

        """
        settings = self.mel
        clip = open_audio(data, media.options.sampling_rate).clip(settings.rate, settings.max_samples)
        num_frames = settings.num_frames(clip.num_samples)
        if num_frames < self.least_frames:
            raise MediaError(
                f"the audio clip has {clip.num_samples} samples at {settings.rate} Hz; it must have at least "
                f"{settings.least_samples(self.least_frames)}"
            )
        specs = self.specs((num_frames,))

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            write_log_mel(clip.decode(), settings, arrays[SPECTROGRAM])

        plan = Plan(
            num_features=self.num_features(num_frames),
            specs=specs,
            settings=f"sound of {media.options.sampling_rate}, {settings}, {specs[SPECTROGRAM].shape[1]} frames",
            grid=(num_frames,),
        )
        return plan, write

    def specs(self, grid: tuple[int, ...]) -> dict[str, ArraySpec]:
        """Return `Processor.specs_of` for a clip."""
        if not grid:
            return {}
        stored = min(grid[0] + self.further_frames, self.mel.max_frames)
        return {SPECTROGRAM: ArraySpec((self.mel.num_bins, stored), "float32")}

    def inputs(self, item: Item, device: torch.device, mask: str | None) -> dict[str, Tensor]:
        """Return the spectrogram of an item in transformers' layout, float32 [1, bins, frames], and its mask.

        Args:
            item: The item. The last number of its grid is the number of frames.
            device: Where the spectrogram is copied to.
            mask: Name of the mask of the clip's frames in transformers, or None.

        """
        stored, num_frames = to_device(item.view, SPECTROGRAM, device), item.shape.grid[-1]
        length = self.mel.max_frames if self.mel.pads else -(-num_frames // self.chunk) * self.chunk
        # The logarithm of silence is -10, or 8 less than the maximum. Spectrograms have it plus 4, divided by 4.
        silence = torch.clamp(stored.max() - 2, min=-1.5)
        frames = torch.cat([stored, silence.expand(len(stored), length - stored.shape[1])], 1).unsqueeze(0)
        is_frame = (torch.arange(length) < num_frames).int().unsqueeze(0)
        return {SPECTROGRAM: frames} if mask is None else {SPECTROGRAM: frames, mask: is_frame}

    def is_possible(self, num_frames: int) -> bool:
        """Return whether a clip can have this number of frames."""
        return self.least_frames <= num_frames <= self.mel.max_frames

    def spelling(self, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        """Return `Processor.spelling` for a clip. The grid may be empty if the number of frames is unknown."""
        is_possible = num_features <= self.max_tokens
        if grid:
            is_possible = len(grid) == 1 and self.is_possible(grid[0]) and self.num_features(grid[0]) == num_features
        return Spelling() if is_possible else None


class ClipProcessor(Processor):
    """Processor of a family that takes only audio clips.

    The block of a clip contains `input_features`, float32 [bins, frames]. The grid is (frames,).
    """

    clips: Clips
    mask: ClassVar[str | None] = "feature_attention_mask"
    """Name of the mask of frames in transformers. None if transformers' model has no mask."""

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        return self.clips.inputs(item, device, self.mask)

    @property
    def speech(self) -> SpeechTraits:
        return SpeechTraits(window_s=self.clips.window_s)

    def max_tokens(self, kind: Kind) -> int:
        return self.clips.max_tokens

    def worst_case(self, kind: Kind) -> Data:
        return self.clips.worst_case()

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        return self.clips.plan(media, data)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        return self.clips.spelling(num_features, grid)

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return self.clips.specs(grid)


def read_mel(checkpoint: Checkpoint, tower: Any, classes: Mapping[str, Mapping[str, Any]]) -> MelSettings:
    """Return the settings of the spectrograms that the audio tower expects.

    Args:
        checkpoint: The checkpoint.
        tower: Section of config.json for the audio tower.
        classes: Names of the supported feature extractors, with their default settings.

    Raises:
        UnsupportedCheckpoint: The preprocessor does not fit the tower.

    """
    where = f"{checkpoint.path} (audio)"
    settings = checkpoint.preprocessor("audio", classes)
    check_settings(settings, {"feature_size": tower.num_mel_bins}, where)
    return MelSettings.read(settings, where)
