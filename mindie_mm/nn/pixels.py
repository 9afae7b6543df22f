"""From the uint8 patches of shared memory to what a patch embedding takes; runs on the device, pure torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindie_mm.device import upload

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
"""Mean, and standard deviation, of SigLIP's pictures and of others."""


def normalize_patches(
    patches: torch.Tensor, mean: Sequence[float], std: Sequence[float], rescale_factor: float = 1 / 255
) -> torch.Tensor:
    """uint8 [n, k * channels] -> float32 [n, channels * k], each channel by its mean and standard deviation.

    To the last bit what transformers' torchvision backend computes: `(x - mean / rescale) / (std / rescale)`.
    """
    planes = patches.view(len(patches), -1, len(mean)).transpose(1, 2)
    return normalize_planes(planes.contiguous(), mean, std, rescale_factor)  # bytes: cheaper to sort than floats


def normalize_planes(
    planes: torch.Tensor, mean: Sequence[float], std: Sequence[float], rescale_factor: float = 1 / 255
) -> torch.Tensor:
    """The same of patches whose channels lie apart: uint8 [n, channels * k] or [n, channels, k]."""
    channels = (1, len(mean), 1)
    scaled_mean = upload(torch.tensor(mean) * (1.0 / rescale_factor), planes.device)
    scaled_std = upload(torch.tensor(std) * (1.0 / rescale_factor), planes.device)
    values = planes.view(len(planes), len(mean), -1).to(torch.float32)
    return values.sub_(scaled_mean.view(channels)).div_(scaled_std.view(channels)).view(len(planes), -1)


def normalize_pictures(pictures: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """uint8 [n, H, W, 3] -> float32 [n, 3, H, W], to the last bit what torchvision's ToTensor and Normalize compute."""
    planes = pictures.permute(0, 3, 1, 2)
    own_mean, own_std = (upload(values, planes.device).view(1, 3, 1, 1) for values in (mean, std))
    return planes.float().div_(255).sub_(own_mean).div_(own_std)


def repeat_frames(patches: torch.Tensor, temporal_patch_size: int) -> torch.Tensor:
    """[n, 3 * k] -> [n, 3 * temporal_patch_size * k]: an image as a video that stands still."""
    planes = patches.view(len(patches), 3, 1, -1)
    return planes.expand(-1, -1, temporal_patch_size, -1).reshape(len(patches), -1)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, ...] of each item -> those of all, one behind another; one item's are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True, slots=True)
class Normalization:
    """How a checkpoint has its pictures rescaled and normalised."""

    mean: tuple[float, ...]
    """One number a channel, or one for all, as of `std`; empty: not normalised."""
    std: tuple[float, ...]
    rescale_factor: float
    """What bytes are multiplied by; 1.0: not rescaled."""

    @classmethod
    def read(cls, config: Mapping[str, Any], prefix: str = "") -> Normalization:
        """From a preprocessor configuration, completed by its defaults; `prefix` goes before image_mean's name."""
        factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
        if not config.get("do_normalize", True):
            return cls((), (), factor)
        values = (config[f"{prefix}image_{name}"] for name in ("mean", "std"))
        mean, std = ((value,) if isinstance(value, (int, float)) else tuple(value) for value in values)
        return cls(mean, std, factor)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, H, W, channels] -> float32 [n, channels, H, W], to the last bit as the torchvision backend.

        A view whose channels lie last, as they come: convolutions take it, and no byte is moved.
        """
        values = pixels.to(torch.float32)
        if self.mean:
            # A whole row's worth of each, since an operation over three numbers at a time is a slow one.
            rows, (width, channels) = values.flatten(2), pixels.shape[2:]
            scale = 1.0 / self.rescale_factor
            mean, std = (
                upload((torch.tensor(v) * scale).expand(channels).repeat(width), pixels.device)
                for v in (self.mean, self.std)
            )
            values = rows.sub_(mean).div_(std).view(pixels.shape)  # `rows` is a copy where the pixels lie otherwise
        elif self.rescale_factor != 1.0:
            values.mul_(self.rescale_factor)
        return values.permute(0, 3, 1, 2)
