"""Layers that models share."""

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


class PatchProjection(nn.Module):
    """A convolution over patches that lie apart, one output each, as what it is: a matrix product.

    oneDNN takes several times as long for the convolution (docs/decisions/0020-cpu-speed.md).
    """

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight, bias = convolution.weight, convolution.bias
        self.linear = nn.Linear(weight[0].numel(), len(weight), bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The linear layer's: transformers reads its dtype."""
        return self.linear.weight

    def forward(self, patches: Tensor) -> Tensor:
        """[n, channels, *kernel] -> [n, width]."""
        projected: Tensor = self.linear(patches.flatten(1))
        return projected


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
