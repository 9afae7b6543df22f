"""Layers and functions that several models share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mindie_mm.device import kernels_of


class RMSNorm(nn.Module):
    """RMS normalization over the last axis, `x / rms(x) * weight`. The statistics are computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize [..., width] of any float dtype. The result has the same dtype."""
        values = hidden.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(hidden.dtype)


class FewOperatorNorm:
    """RMS normalization for inference. torch's `rms_norm` runs seven operators on the CPU. This class runs four."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Prepare the norm.

        Args:
            weight: [width], or [..., width] for separate weights for each row of the last two axes.
            eps: Number that is added to the mean square.

        """
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        # x / sqrt(mean(x^2) + eps) = sqrt(width) * x / hypot(|x|, sqrt(width * eps))
        self._scaled = weight.float() * math.sqrt(width)
        self._least = self._scaled.new_tensor(math.sqrt(width * eps))

    def __call__(self, values: Tensor) -> Tensor:
        """Normalize the last axis of a float tensor."""
        if values.dtype != torch.float32:  # the length would be rounded
            return rms_norm(values, values.shape[-1:], None, self.eps) * self.weight
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        normalized: Tensor = values / length.hypot_(self._least)
        return normalized.mul_(self._scaled)

    def add(self, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalization of `hidden + added`, and the sum. None stands for zero."""
        total = hidden if added is None else hidden + added
        return self(total), total


class FusedNorm:
    """RMS normalization with the fused operators of a device."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Prepare the norm with `weight` [width], which is on the device."""
        self._weight, self._eps = weight, eps
        self._kernels = kernels_of(weight.device)

    def __call__(self, values: Tensor) -> Tensor:
        """Normalize the last axis of a float tensor."""
        return self._kernels.rms_norm(values, self._weight, self._eps)

    def add(self, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalization of `hidden + added`, and the sum. None stands for zero."""
        if added is None:
            return self(hidden), hidden
        return self._kernels.add_rms_norm(hidden, added, self._weight, self._eps)


def norm_of(weight: Tensor, eps: float) -> FewOperatorNorm | FusedNorm:
    """Return the RMS normalization with `weight` [width] that is fastest on the weight's device."""
    return (FusedNorm if kernels_of(weight.device).has_layers else FewOperatorNorm)(weight, eps)


def is_silu(activation: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Return whether `activation` computes SiLU exactly, in the dtype and on the device of `weight`."""
    values = torch.linspace(-4, 4, 64).to(weight)
    return torch.equal(activation(values), silu(values))


class PatchProjection(nn.Module):
    """A convolution that maps each patch to one output vector, computed as a matrix product.

    On the CPU, the convolution in oneDNN takes several times as long (docs/decisions/0020-cpu-speed.md).
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
        """The weight of the linear layer. transformers reads its dtype."""
        return self.linear.weight

    def forward(self, patches: Tensor) -> Tensor:
        """Project patches [n, channels, *kernel] to [n, width]."""
        projected: Tensor = self.linear(patches.flatten(1))
        return projected


def rotary_angles(positions: Tensor, width: int, base: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary embeddings, float32 [T, width // 2] each.

    All arithmetic is in float32, as in the reference implementations.

    Args:
        positions: int64 [T].
        width: Width of a head.
        base: Base of the frequencies. A number, or float [T] with a base for each position.

    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    bases = torch.as_tensor(base, device=positions.device, dtype=torch.float32).reshape(-1, 1)
    angles = positions.float().unsqueeze(1) * bases.pow(exponents).reciprocal()
    return angles.cos(), angles.sin()


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings. The first half of each head pairs with the second half.

    Args:
        values: [heads, T, width].
        cos: Cosines of the angles, float32 [T, width // 2].
        sin: Sines of the angles, float32 [T, width // 2].

    Returns:
        [heads, T, width], computed in float32 and converted to the dtype of `values`.

    """
    first, second = values.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def split_heads(hidden: Tensor, width: int) -> Tensor:
    """Reshape [T, heads * width] to [heads, T, width]."""
    return hidden.view(len(hidden), -1, width).transpose(0, 1)
