"""Layers that the decoders written here share; those over transformers' modules have their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width], of any float dtype, which the result has too."""
        values = hidden.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(hidden.dtype)


def rotary_angles(positions: Tensor, width: int, base: float | Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [T, width // 2], of positions int64 [T].

    `base` is one number, or float [T], one for each position. All in float32, as the references have it.
    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    bases = torch.as_tensor(base, device=positions.device, dtype=torch.float32).reshape(-1, 1)
    angles = positions.float().unsqueeze(1) * bases.pow(exponents).reciprocal()
    return angles.cos(), angles.sin()


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [heads, T, width], halves as pairs, by angles [T, width // 2]; in float32, the dtype is kept."""
    first, second = values.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def split_heads(hidden: Tensor, width: int) -> Tensor:
    """[T, heads * width] -> [heads, T, width]."""
    return hidden.view(len(hidden), -1, width).transpose(0, 1)


__all__ = ["RMSNorm", "rotary_angles", "rotate", "split_heads"]
