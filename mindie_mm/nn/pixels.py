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
    channels = (1, len(mean), 1)
    scaled_mean = torch.tensor(mean, device=patches.device) * (1.0 / rescale_factor)
    scaled_std = torch.tensor(std, device=patches.device) * (1.0 / rescale_factor)
    planes = (
        patches.view(len(patches), -1, len(mean)).transpose(1, 2).contiguous()
    )  # bytes: cheaper to sort than floats
    values = planes.to(torch.float32)
    return values.sub_(scaled_mean.view(channels)).div_(scaled_std.view(channels)).view(len(patches), -1)


def repeat_frames(patches: torch.Tensor, temporal_patch_size: int, channels: int = 3) -> torch.Tensor:
    """[n, channels * k] -> [n, channels * temporal_patch_size * k]: an image as a video that stands still."""
    planes = patches.view(len(patches), channels, 1, -1)
    return planes.expand(-1, -1, temporal_patch_size, -1).reshape(len(patches), -1)
