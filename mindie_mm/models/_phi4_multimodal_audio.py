"""The audio encoder of Phi-4-multimodal, a conformer, for clips of any length.

Source: arXiv 2503.01743, section 2.2. Attention sees chunks of 500 features, or 40 s. As in the reference, the last
chunk of a longer clip is padded with zeros, and its features attend to this padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

_STRIDE = 8
"""Number of frames per feature. Three convolutions halve the number of frames."""
_CHUNK = 500
"""Number of features of a chunk."""
_CHUNKS_AT_ONCE = 4
"""Maximum number of chunks that the layers compute at once."""


def clip_features(num_frames: int) -> int:
    """Return the number of features of a clip."""
    return -(-num_frames // _STRIDE)


def longest_clip(num_tokens: int) -> int:
    """Return the number of frames of the longest clip that has at most `num_tokens` features."""
    return num_tokens * _STRIDE


def encode_clips(encoder: Any, clips: Sequence[Tensor]) -> list[Tensor]:
    """Return the features of each clip, [features, width].

    Args:
        encoder: The encoder, a module of transformers.
        clips: Filter banks, [frames, bins].

    """
    chunks = [chunk for clip in clips for chunk in _chunks(encoder, clip)]
    places: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        places.setdefault(len(chunk), []).append(place)
    for own in places.values():
        bias = encoder.relative_attention_bias_layer(chunks[own[0]].unsqueeze(0))  # [1, heads, length, length]
        for start in range(0, len(own), _CHUNKS_AT_ONCE):
            some = own[start : start + _CHUNKS_AT_ONCE]
            hidden = torch.stack([chunks[place] for place in some])
            for layer in encoder.encoders:
                hidden = layer(hidden, bias)
            for place, encoded in zip(some, hidden, strict=True):
                chunks[place] = encoded
    features, left = [], iter(chunks)
    for clip in clips:
        length = clip_features(len(clip))
        own_chunks = [next(left) for _ in range(0, length, _CHUNK)]
        features.append(torch.cat(own_chunks)[:length])
    return features


def _chunks(encoder: Any, clip: Tensor) -> Iterator[Tensor]:
    """Yield the inputs of the layers, [features, width], for the chunks of a clip [frames, bins].

    The convolutions see one chunk at a time, because their results are many times as large as the features. A feature
    depends on its own frames and the frames of the feature before.
    """
    is_single = clip_features(len(clip)) <= _CHUNK
    for start in range(0, len(clip), _CHUNK * _STRIDE):
        before = _STRIDE if start else 0
        frames = encoder.encoder_embedding(clip[start - before : start + _CHUNK * _STRIDE])
        chunk, _ = encoder.embed(frames.unsqueeze(0), None)
        chunk = chunk[0, bool(before) :]
        yield chunk if is_single else F.pad(chunk, (0, 0, 0, _CHUNK - len(chunk)))
