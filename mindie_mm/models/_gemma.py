"""Parts that Gemma 3 and later Gemma models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import MediaError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.usm import UsmSettings, write_usm
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Write
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device

SPECTROGRAM = "input_features"
"""Name of the array of an audio clip, float32 [frames, bins], as in transformers."""


def enclosed(checkpoint: Checkpoint, kind: Kind, texts: Mapping[str, str], token: int) -> list[str]:
    """Return the texts of the tokens before, of and after an item.

    Args:
        checkpoint: The checkpoint.
        kind: Kind of the item.
        texts: Keys of tokenizer_config.json for these tokens, with the texts of the tokens if the keys are missing.
        token: Id of the item's token in config.json.

    Raises:
        UnsupportedCheckpoint: The tokenizer lacks a token, or has another id for the item's token.

    """
    found = [checkpoint.special_token(name) or text for name, text in texts.items()]
    _, own, _ = map(checkpoint.token_id, found)
    if own != token:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: {kind}_token_id is {token}, but the tokenizer's id of {found[1]!r} is {own}"
        )
    return found


def planned_clip(media: Media, data: Data, usm: UsmSettings) -> tuple[int, str, Write]:
    """Return the number of frames of an audio clip, its settings, and the function that writes its `SPECTROGRAM`.

    Raises:
        MediaError: The clip is too short for a frame.

    """
    clip = open_audio(data, media.options.sampling_rate).clip(usm.rate, usm.max_samples)
    if not (frames := usm.num_frames(clip.num_samples)):
        raise MediaError(
            f"the audio clip has {clip.num_samples} samples at {usm.rate} Hz; it must have at least {usm.least_samples}"
        )

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        write_usm(clip.decode(), usm, arrays[SPECTROGRAM])

    return frames, f"sound of {media.options.sampling_rate}, {usm}", write


def clip_inputs(item: Item, device: torch.device) -> dict[str, Tensor]:
    """Return `ModelInputs.item_inputs` of an audio clip."""
    frames = to_device(item.view, SPECTROGRAM, device).unsqueeze(0)
    return {SPECTROGRAM: frames, f"{SPECTROGRAM}_mask": torch.ones(frames.shape[:2], dtype=torch.bool)}


def spans_of(length: int, items: Sequence[MediaItem]) -> Tensor | None:
    """Return `Model.bidirectional_spans` with a span for each run of adjacent placeholders of `items`."""
    if not items:
        return None
    slots = np.concatenate([item.slots for item in items])
    span_ids = torch.full((length,), -1)
    span_ids[slots] = torch.from_numpy(np.cumsum(np.diff(slots, prepend=-2) != 1) - 1)
    return span_ids


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return the logits between -cap and cap, or unchanged if `cap` is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
