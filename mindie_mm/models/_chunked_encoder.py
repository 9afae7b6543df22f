"""The audio encoder of Qwen3-Omni and Qwen3-ASR, which encodes clips of any length.

Source: arXiv 2509.17765, section 2.2. Convolutions see chunks of one second, and attention sees windows of several
chunks, so that time and memory grow in proportion to the length of a clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._clips import encoder_length

_CHUNK = 100
"""Number of frames of a chunk."""
_SLICE = 4
"""Number of chunks in a call to the convolutions, whose results are 100 times as large as a chunk's features."""


def chunked_length(num_frames: int) -> int:
    """Return the number of features of a clip. Three convolutions halve the number of frames of each chunk."""
    chunks, rest = divmod(num_frames, _CHUNK)
    return chunks * _PER_CHUNK + _convolved(rest)


def _convolved(num_frames: int) -> int:
    return encoder_length(encoder_length(encoder_length(num_frames)))


_PER_CHUNK = _convolved(_CHUNK)


def longest_clip(num_tokens: int) -> int:
    """Return the number of frames of the longest clip of complete chunks that has at most `num_tokens` features."""
    return num_tokens // _PER_CHUNK * _CHUNK


def check_encoder(tower: Any, where: str) -> None:
    """Raise UnsupportedCheckpoint if the chunks are not those of published encoders. `tower` is its configuration."""
    if 2 * tower.n_window != _CHUNK:
        raise UnsupportedCheckpoint(f"{where}: n_window is {tower.n_window}; only {_CHUNK // 2} is supported")


def encode_clips(tower: Any, clips: Sequence[Tensor], *, pads: bool) -> Tensor:
    """Return the hidden states of the encoder's last layer for all clips, [features, width].

    Args:
        tower: The encoder, a module of transformers.
        clips: Spectrograms, [bins, frames].
        pads: Whether the reference pads a clip shorter than a chunk to a whole chunk.

    """
    hidden = torch.cat([_convolve(tower, clip, pads=pads) for clip in clips])
    window = tower.n_window_infer // _CHUNK * _PER_CHUNK
    lengths = [length for clip in clips for length in _windows(chunked_length(clip.shape[1]), window)]
    # The bounds stay on the host, where the attention layers read them.
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    for layer in tower.layers:
        hidden = layer(hidden, bounds)[0]
    normalized: Tensor = tower.ln_post(hidden)
    return normalized


def _windows(length: int, window: int) -> Iterator[int]:
    for start in range(0, length, window):
        yield min(window, length - start)


def _convolve(tower: Any, clip: Tensor, *, pads: bool) -> Tensor:
    """Return the inputs of the first layer for a clip, [features, width]."""
    num_frames = clip.shape[1]
    width = _CHUNK if pads else min(num_frames, _CHUNK)
    chunks = F.pad(clip, (0, -num_frames % width)).unflatten(1, (-1, width)).transpose(0, 1)  # [chunks, bins, width]
    rows = torch.cat([_embed(tower, some) for some in chunks.unsqueeze(1).split(_SLICE)])  # [chunks, rows, width]
    rows += tower.positional_embedding.positional_embedding[: rows.shape[1]].to(rows.dtype)
    return rows.flatten(0, 1).narrow(0, 0, chunked_length(num_frames))  # only the last chunk has rows beyond the clip


def _embed(tower: Any, chunks: Tensor) -> Tensor:
    """Return the features of chunks before the layers, [chunks, features, width]."""
    for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        chunks = F.gelu(convolution(chunks))
    embedded: Tensor = tower.conv_out(chunks.permute(0, 3, 1, 2).flatten(2))
    return embedded
