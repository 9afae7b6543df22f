"""Fused operators of torch_npu on the rows of a flat batch, for decoder layers.

Rows are [T, width] or [T, heads, head_dim] and contiguous, because the operators copy other inputs first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROTATE_BOTH = "npu_apply_rotary_pos_emb"
_ROTATED_TOGETHER = (64, 128)
"""Widths of a head that ROTATE_BOTH supports."""
_LANE_BYTES = 32
"""The width of a head in bytes must be a multiple of this number. Otherwise, npu_rotary_mul is slower."""
_MAX_ROTATED = 896
"""Exclusive upper limit on the width of a head for npu_rotary_mul."""
_MAX_HEADS = 1000
"""Exclusive upper limit on the number of heads for npu_rotary_mul."""


def scatter_both(pages: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys and values with one operator. The arguments are those of `Kernels.store`."""
    torch.ops.npu.npu_scatter_pa_kv_cache(key.contiguous(), value.contiguous(), *pages, slots, cache_mode="Norm")


def scatter(pages: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys and values with one operator each. The arguments are those of `Kernels.store`."""
    for part, new in zip(pages, (key, value), strict=True):
        torch.ops.npu.npu_scatter_nd_update_(part.flatten(0, 1), slots.unsqueeze(1), new.contiguous())


def add_rms_norm(hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normalized, _, total = torch.ops.npu.npu_add_rms_norm(hidden, added, weight, eps)
    return normalized, total


def split(joined: Tensor, widths: Sequence[int]) -> list[Tensor]:
    parts = [joined.new_empty(len(joined), width) for width in widths]
    torch.split_with_sizes_copy(joined, [*widths], 1, out=parts)
    return parts


def swiglu(joined: Tensor) -> Tensor:
    out: Tensor = torch.ops.npu.npu_swiglu(joined, -1)
    return out


def rotates(operator: str, query: Tensor, key: Tensor) -> bool:
    """Return whether the documentation of a rotary operator allows these heads."""
    width = query.shape[-1]
    if operator == ROTATE_BOTH:
        return width in _ROTATED_TOGETHER
    fits = width < _MAX_ROTATED and width * query.itemsize % _LANE_BYTES == 0
    return fits and max(query.shape[1], key.shape[1]) < _MAX_HEADS


def rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in place with one operator. The arguments are those of `Kernels.rotate`."""
    # The layout BSND with a batch of one has the rows in the same order as here.
    angles = (angle[None, :, None] for angle in (cos, sin))
    rotated = torch.ops.npu.npu_apply_rotary_pos_emb(query[None], key[None], *angles)
    return rotated[0][0], rotated[1][0]


def rotate_rows(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate with one operator each. The arguments are those of `Kernels.rotate`."""
    angles = cos[None, :, None], sin[None, :, None]
    rotated_query, rotated_key = (torch.ops.npu.npu_rotary_mul(values[None], *angles)[0] for values in (query, key))
    return rotated_query, rotated_key
