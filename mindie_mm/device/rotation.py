"""Replacement of transformers' rotary embedding functions, for devices that have faster functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

TEXT, TOWER = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"
"""Names of transformers' functions, which layers look up as module globals.

The arguments of TEXT are [batch, heads, T, width] and angles [batch, T, width]. The arguments of TOWER are [T, heads,
width] and angles [T, width].
"""


def replace(module: nn.Module, name: str, rotate: Callable[..., Any]) -> None:
    """Make the layers of `module` call `rotate` with transformers' own function as an additional first argument.

    The function is replaced only if a trial shows that it pairs the first half of a head with the second half. The
    replacement affects all layers of the same Python modules in this process, on any device. Repeated calls have no
    further effect.

    Args:
        module: The model.
        name: TEXT or TOWER.
        rotate: The replacement.

    """
    for source in {sys.modules[type(part).__module__] for part in module.modules()}:
        own: Any = getattr(source, name, None)
        if own is not None and not _calls(own, rotate) and _rotates_halves(own, name):
            setattr(source, name, partial(rotate, own))


def _calls(own: Any, rotate: Callable[..., Any]) -> bool:
    return isinstance(own, partial) and (own.func is rotate or _calls(own.args[0], rotate))


def _rotates_halves(own: Callable[..., Any], name: str) -> bool:
    shape, angle_shape, heads = ((1, 2, 3, 16), (1, 3, 16), 1) if name == TEXT else ((3, 2, 16), (3, 16), -2)
    values, angles = torch.randn(2, *shape), torch.randn(2, *angle_shape)
    cos, sin = (angle.unsqueeze(heads) for angle in angles)
    halves = torch.cat([-values[..., 8:], values[..., :8]], -1)
    try:
        return all(map(torch.allclose, own(*values, *angles), values * cos + halves * sin))
    except (TypeError, RuntimeError, ValueError):  # the function needs other arguments
        return False
