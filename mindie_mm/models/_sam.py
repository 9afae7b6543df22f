"""Learned positions of SAM's tower, which transformers computes from the weights in every call."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from mindie_mm.device import upload


def keep_positions(tower: nn.Module) -> None:
    """Let a loaded SAM tower compute its positions once per size, on the CPU.

    transformers' indices are on the host, so each layer would wait for the device twice. The positions of patches are
    resized with antialiasing, which not every device supports.
    """
    for part in tower.modules():
        if hasattr(part, "get_rel_pos"):
            _keep_relative(part)
        if hasattr(part, "interpolate_pos_encoding"):
            _keep_absolute(part)


def _keep_relative(attention: Any) -> None:
    compute = type(attention).get_rel_pos

    @cache
    def kept(name: str, q_size: int, k_size: int) -> Tensor:
        weight = getattr(attention, name).detach()
        return upload(compute(attention, q_size, k_size, weight.cpu()), weight.device)

    def get_rel_pos(q_size: int, k_size: int, rel_pos: Tensor) -> Tensor:
        return kept("rel_pos_h" if rel_pos is attention.rel_pos_h else "rel_pos_w", q_size, k_size)

    attention.get_rel_pos = get_rel_pos


def _keep_absolute(encoder: Any) -> None:
    compute = type(encoder).interpolate_pos_encoding

    @cache
    def kept(height: int, width: int) -> Tensor:
        weight = encoder.pos_embed.detach()
        return upload(compute(SimpleNamespace(pos_embed=weight.cpu()), height, width), weight.device)

    encoder.interpolate_pos_encoding = kept
