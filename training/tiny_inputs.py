"""Conversion of samples to model inputs by the server's rules for resizing, patches and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn.functional import interpolate
from transformers import WhisperFeatureExtractor

from mindie_mm.models._qwen_pixels import PixelSettings, smart_resize
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from training.samples import Sample
from training.sounds import make
from training.tiny_layout import (
    HOP,
    IMAGE_PIXELS,
    MELS,
    MERGE,
    PATCH,
    POSITIONS_PER_SECOND,
    RATE,
    TEMPORAL,
    VIDEO_PIXELS,
)
from training.tiny_truth import IGNORED, heard, truth

_EARS = WhisperFeatureExtractor(feature_size=MELS, sampling_rate=RATE, hop_length=HOP)
_MEAN = torch.tensor(CLIP_MEAN).view(3, 1, 1) * 255
_STD = torch.tensor(CLIP_STD).view(3, 1, 1) * 255


def patches(frames: Sequence[Image.Image], pixels: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Convert an image or a video's frames to uint8 patches [t * h * w, 1176] with their grid (t, h, w)."""
    array = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    stack = torch.from_numpy(array).permute(0, 3, 1, 2)  # (F, 3, H, W)
    limits = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
    size = smart_resize(stack.shape[2], stack.shape[3], PixelSettings.read({"size": limits}, "training"))
    stack = interpolate(stack, size=size, mode="bicubic", antialias=True)
    if missing := -len(stack) % TEMPORAL:
        stack = torch.cat([stack, stack[-1:].expand(missing, -1, -1, -1)])
    t, h, w = len(stack) // TEMPORAL, size[0] // PATCH, size[1] // PATCH
    cut = stack.reshape(t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(t * h * w, 3 * TEMPORAL * PATCH * PATCH), (t, h, w)


def normalise(raw: torch.Tensor) -> torch.Tensor:
    """Normalize uint8 patches [N, 1176] to the float32 input of the vision tower."""
    apart = raw.view(len(raw), 3, -1).float()
    return ((apart - _MEAN.view(3, 1)) / _STD.view(3, 1)).view(len(raw), -1)


def mels(samples: np.ndarray) -> torch.Tensor:
    """Compute the log-mel features of a clip, float32 [64, frames], as if more silence followed."""
    frames = -(-len(samples) // HOP)
    # Half a window of silence at the end gives the same features as the server's padding to half a minute.
    extracted = _EARS(
        samples, sampling_rate=RATE, max_length=(frames + 4) * HOP, padding="max_length", return_tensors="pt"
    )
    features: torch.Tensor = extracted["input_features"][0, :, :frames]
    return features


def audio_tokens(frames: int) -> int:
    """Return the number of features that the audio tower computes from `frames` mel frames."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, video or sound as model input."""

    kind: str
    array: torch.Tensor
    """uint8 patches [t * h * w, 1176] or float32 mels [64, frames]."""
    grid: tuple[int, int, int]
    """Patches along time, height and width. A sound has (tokens, 1, 1)."""
    truth: torch.Tensor
    """Training targets of each token."""

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return t if self.kind == "audio" else t * h * w // MERGE**2


def media_of(sample: Sample) -> list[Medium]:
    """Convert the sample's media, in the same order as in the prompt."""
    media: dict[str, list[Medium]] = {"image": [], "video": [], "audio": []}
    stills = sample.scenes[: len(sample.images)]
    for image, scene in zip(sample.images, stills, strict=True):
        raw, grid = patches([image], IMAGE_PIXELS)
        media["image"].append(Medium("image", raw, grid, truth((scene,), grid, MERGE)))
    if sample.frames:
        raw, grid = patches(sample.frames, VIDEO_PIXELS)
        media["video"].append(Medium("video", raw, grid, truth(sample.scenes[len(stills) :], grid, MERGE)))
    for sound in sample.sounds:
        samples, spans = make(sound)
        features = mels(samples)
        tokens = audio_tokens(features.shape[1])
        media["audio"].append(Medium("audio", features, (tokens, 1, 1), heard(sound, spans, tokens)))
    return [medium for kind in sample.order for medium in media[kind]]


TOKENS = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as model input."""

    ids: list[int]
    labels: list[int]
    """Ids of the answers and the tokens that end them, `IGNORED` elsewhere."""
    positions: torch.Tensor
    """int64 [3, T]"""
    media: list[Medium]


def encode(tokenizer: Tokenizer, sample: Sample, *, answered: bool = True, second_per_grid: float = 1.0) -> Encoded:
    """Encode the sample's prompt as the chat template does. If `answered` is off, stop before the first answer."""
    media = media_of(sample)
    shown = ""
    for medium in media:
        sense = "audio" if medium.kind == "audio" else "vision"
        shown += f"<|{sense}_bos|>{TOKENS[medium.kind] * medium.tokens}<|{sense}_eos|>"
    ids: list[int] = []
    labels: list[int] = []

    def add(text: str, learned: bool = False) -> None:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(tokens)
        labels.extend(tokens if learned else [IGNORED] * len(tokens))

    if sample.system is not None:
        add(f"<|im_start|>system\n{sample.system}<|im_end|>\n")
    for question, answer in sample.turns:
        asked = question + shown if sample.text_first else shown + question
        shown = ""
        add(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        if not answered:
            break
        add(f"{answer}<|im_end|>", learned=True)
        add("\n")
    return Encoded(ids, labels, positions(tokenizer, ids, media, second_per_grid), media)


def positions(tokenizer: Tokenizer, ids: list[int], media: Sequence[Medium], second_per_grid: float) -> torch.Tensor:
    """Compute Qwen2.5-Omni's positions on the axes time, height and width, int64 [3, T]."""
    pads = {tokenizer.token_to_id(token) for token in TOKENS.values()}
    placed: list[torch.Tensor] = []
    left, index, start = list(media), 0, 0
    while index < len(ids):
        if ids[index] not in pads:
            placed.append(torch.full((3, 1), start))
            index, start = index + 1, start + 1
            continue
        medium = left.pop(0)
        t, h, w = medium.grid
        if medium.kind == "audio":
            here = torch.arange(t).expand(3, -1)
        else:
            pace = second_per_grid * POSITIONS_PER_SECOND
            times = (torch.arange(t) * pace).long()
            grid = torch.meshgrid(times, torch.arange(h // MERGE), torch.arange(w // MERGE), indexing="ij")
            here = torch.stack(grid).view(3, -1)
        placed.append(here + start)
        index, start = index + medium.tokens, start + int(here.max()) + 1
    return torch.cat(placed, dim=1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples padded on the right to one length. Causal attention never sees the padding."""

    ids: torch.Tensor
    """int64 [B, T]"""
    labels: torch.Tensor
    """int64 [B, T]"""
    positions: torch.Tensor
    """int64 [3, B, T]"""
    tasks: list[str]
    media: list[Medium]
    """Media of all prompts, in the same order as in the prompts."""


def collate(items: Sequence[Encoded], tasks: Sequence[str], pad: int) -> Batch:
    """Collate encoded samples into one batch."""
    longest = max(len(item.ids) for item in items)

    def fill(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    places = torch.zeros(3, len(items), longest, dtype=torch.long)
    for i, item in enumerate(items):
        places[:, i, : len(item.ids)] = item.positions
    return Batch(
        fill([item.ids for item in items], pad),
        fill([item.labels for item in items], IGNORED),
        places,
        list(tasks),
        [medium for item in items for medium in item.media],
    )
