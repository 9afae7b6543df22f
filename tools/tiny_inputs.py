"""Samples as model inputs, by the rules that the server follows: resize, patches, prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn.functional import interpolate

from tools.samples import Sample
from tools.tiny_layout import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_PIXELS,
    MERGE,
    PATCH,
    TEMPORAL,
    VIDEO_PIXELS,
)
from tools.tiny_truth import IGNORED, truth

_MEAN = torch.tensor(CLIP_MEAN).view(3, 1, 1) * 255
_STD = torch.tensor(CLIP_STD).view(3, 1, 1) * 255


def smart_resize(height: int, width: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """Qwen2-VL's target size: sides in multiples of 28, the area within `pixels`."""
    factor, (smallest, largest) = PATCH * MERGE, pixels
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > largest:
        shrink = math.sqrt(height * width / largest)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < smallest:
        grow = math.sqrt(smallest / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def patches(frames: Sequence[Image.Image], pixels: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """One picture, or a video's frames, as uint8 patches [t * h * w, 1176] and its grid (t, h, w)."""
    array = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    stack = torch.from_numpy(array).permute(0, 3, 1, 2)  # (F, 3, H, W)
    size = smart_resize(stack.shape[2], stack.shape[3], pixels)
    stack = interpolate(stack, size=size, mode="bicubic", antialias=True)
    if missing := -len(stack) % TEMPORAL:
        stack = torch.cat([stack, stack[-1:].expand(missing, -1, -1, -1)])
    t, h, w = len(stack) // TEMPORAL, size[0] // PATCH, size[1] // PATCH
    cut = stack.reshape(t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(t * h * w, 3 * TEMPORAL * PATCH * PATCH), (t, h, w)


def normalise(raw: torch.Tensor) -> torch.Tensor:
    """uint8 patches [N, 1176] as the float32 that the vision tower takes."""
    apart = raw.view(len(raw), 3, -1).float()
    return ((apart - _MEAN.view(3, 1)) / _STD.view(3, 1)).view(len(raw), -1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as the model takes it."""

    ids: list[int]
    labels: list[int]
    """The ids of the answers and of what ends them, `IGNORED` elsewhere."""
    image_patches: list[torch.Tensor]
    image_grids: list[tuple[int, int, int]]
    video_patches: list[torch.Tensor]
    video_grids: list[tuple[int, int, int]]
    truths: list[torch.Tensor]
    """What each visual token ought to know, one tensor a medium."""


def encode(tokenizer: Tokenizer, sample: Sample, *, answered: bool = True) -> Encoded:
    """The sample's prompt in the chat template's form; up to the first answer if not `answered`."""
    images = [patches([image], IMAGE_PIXELS) for image in sample.images]
    videos = [patches(sample.frames, VIDEO_PIXELS)] if sample.frames else []
    media = ""
    for pad, items in (("<|image_pad|>", images), ("<|video_pad|>", videos)):
        for _, (t, h, w) in items:
            media += f"<|vision_start|>{pad * (t * h * w // MERGE**2)}<|vision_end|>"
    ids: list[int] = []
    labels: list[int] = []

    def add(text: str, learned: bool = False) -> None:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(tokens)
        labels.extend(tokens if learned else [IGNORED] * len(tokens))

    if sample.system is not None:
        add(f"<|im_start|>system\n{sample.system}<|im_end|>\n")
    for question, answer in sample.turns:
        asked = question + media if sample.text_first else media + question
        media = ""
        add(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        if not answered:
            break
        add(f"{answer}<|im_end|>", learned=True)
        add("\n")
    image_patches, image_grids = [p for p, _ in images], [g for _, g in images]
    video_patches, video_grids = [p for p, _ in videos], [g for _, g in videos]
    scenes = [(scene,) for scene in sample.scenes] if images else [sample.scenes]
    truths = (
        [truth(s, g, MERGE) for s, g in zip(scenes, image_grids + video_grids, strict=True)] if sample.scenes else []
    )
    return Encoded(ids, labels, image_patches, image_grids, video_patches, video_grids, truths)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, padded on the right: causal attention never looks there."""

    ids: torch.Tensor
    """int64 [B, T]"""
    labels: torch.Tensor
    """int64 [B, T]"""
    tasks: list[str]
    image_patches: torch.Tensor | None
    """uint8 [N, 1176]"""
    image_grids: torch.Tensor | None
    """int64 [images, 3]"""
    video_patches: torch.Tensor | None
    video_grids: torch.Tensor | None
    image_truths: torch.Tensor
    """float32 [visual tokens, 6]"""
    video_truths: torch.Tensor


def collate(items: Sequence[Encoded], tasks: Sequence[str], pad: int) -> Batch:
    """Encoded samples as one batch."""
    longest = max(len(item.ids) for item in items)

    def fill(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    def join(
        parts: list[torch.Tensor], grids: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (torch.cat(parts), torch.tensor(grids)) if parts else (None, None)

    images = join(
        [p for item in items for p in item.image_patches],
        [g for item in items for g in item.image_grids],
    )
    videos = join(
        [p for item in items for p in item.video_patches],
        [g for item in items for g in item.video_grids],
    )
    image_truths = [one for item in items if item.image_grids for one in item.truths]
    video_truths = [one for item in items if item.video_grids for one in item.truths]
    none = [torch.empty(0, 6)]
    return Batch(
        fill([item.ids for item in items], pad),
        fill([item.labels for item in items], IGNORED),
        list(tasks),
        *images,
        *videos,
        torch.cat(none + image_truths),
        torch.cat(none + video_truths),
    )
