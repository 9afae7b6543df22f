"""Replacements for transformers' layers that make fewer passes over memory.

Memory traffic determines the time of an elementwise operator on a tower's activations. transformers computes rotary
embeddings with five separate operators, which take a tenth of the run time of a tower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mindie_mm.device import rotation

_Rotated = tuple[Tensor, Tensor]


class QuickGELU(nn.Module):
    """A replacement for transformers' QuickGELU activation that allocates one tensor instead of three."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply the activation to a tensor of any shape."""
        return torch.mul(values, 1.702).sigmoid_().mul_(values)


def lighten(module: nn.Module) -> None:
    """Replace the activations and rotary embeddings of `module`. Other devices keep transformers' embeddings."""
    from transformers.activations import (
        QuickGELUActivation,
    )  # imported late: the import takes seconds, and not every process has a model

    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is QuickGELUActivation:
                setattr(parent, name, QuickGELU())
    rotation.replace(module, rotation.TEXT, _rotate_text)
    rotation.replace(module, rotation.TOWER, _rotate_tower)


def _rotate_text(
    own: Callable[..., _Rotated], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> _Rotated:
    if not _takes(q, k, cos, sin):
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotate_tower(own: Callable[..., _Rotated], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> _Rotated:
    if not _takes(q, k, cos, sin):
        return own(q, k, cos, sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _takes(*values: Tensor) -> bool:
    return all(
        one.device.type == "cpu" and one.dtype == torch.float32 and one.shape[-1] == values[0].shape[-1]
        for one in values
    )


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements. Each pair has one element from each half of the last axis."""
    half = values.shape[-1] // 2
    out = values * cos
    out[..., :half].addcmul_(values[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(values[..., :half], sin[..., half:])
    return out


__all__ = ["QuickGELU", "lighten"]
