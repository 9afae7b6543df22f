"""Where transformers' attention layers rotate queries and keys, for devices that do it otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

TEXT, TOWER = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"
"""transformers' functions, which layers look up by name: of [batch, heads, T, width] and angles [batch, T, width], and
of [T, heads, width] and angles [T, width]."""


def replace(module: nn.Module, name: str, rotate: Callable[..., Any]) -> None:
    """Has the layers of `module` rotate by `rotate`, which is given transformers' own function before its arguments.

    Only where that one rotates halves as pairs, which is tried. It counts for all layers of their modules in this
    process, on whatever device; once, however often it is called.
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
    except (TypeError, RuntimeError, ValueError):  # it takes other things
        return False
