"""From the uint8 patches of shared memory to what a patch embedding takes; runs on the device, pure torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    scaled_mean = torch.tensor(mean, device=planes.device) * (1.0 / rescale_factor)
    scaled_std = torch.tensor(std, device=planes.device) * (1.0 / rescale_factor)
    values = planes.view(len(planes), len(mean), -1).to(torch.float32)
    return values.sub_(scaled_mean.view(channels)).div_(scaled_std.view(channels)).view(len(planes), -1)


def repeat_frames(patches: torch.Tensor, temporal_patch_size: int, channels: int = 3) -> torch.Tensor:
    """[n, channels * k] -> [n, channels * temporal_patch_size * k]: an image as a video that stands still."""
    planes = patches.view(len(patches), channels, 1, -1)
    return planes.expand(-1, -1, temporal_patch_size, -1).reshape(len(patches), -1)
