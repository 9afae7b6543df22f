"""Rotary positions on the three axes time, height and width (M-RoPE).

Source: Qwen2-VL (arXiv 2409.12191, section 2.1). A text token has the same position on all axes, and each text token
advances the position by one. The tokens of a media item are numbered by their place in its grid, starting one past the
largest position before the item. Text after the item starts one past the largest position on any axis. transformers
5.23 leaves the time axis out of this maximum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.nn.model import Positions

Grid = tuple[int, int, int]
"""Number of tokens along time, height and width, after patches are merged."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Positions of consecutive tokens that belong to a media item."""

    start: int
    """Index of the first token."""
    axes: NDArray[np.int64]
    """Positions, [3, tokens], relative to the position that a text token would have at `start`."""
    after: int
    """Relative position of the token after the block."""


def mrope_positions(
    num_tokens: int,
    spans: Iterable[tuple[int, int, Grid]],
    intervals: Iterable[float] | None = None,
) -> Positions:
    """Return the positions of a prompt on the axes t, h and w.

    Args:
        num_tokens: Number of tokens of the prompt.
        spans: (start, stop, grid) of each run of media tokens, in ascending order.
        intervals: Distance between two steps on the time axis of each span. None means 1. Time positions are
            computed in float32 and rounded down.

    """
    blocks = []
    for (start, stop, grid), interval in zip(spans, repeat(1.0) if intervals is None else intervals, strict=False):
        assert stop - start == grid[0] * grid[1] * grid[2], (start, stop, grid)
        blocks.append(grid_block(start, grid, interval))
    return positions_of(num_tokens, blocks)


def grid_block(start: int, grid: Grid, interval: float = 1.0, scale: float = 1.0) -> Block:
    """Return the block of an item with the grid `grid`, whose first token is at `start`.

    `grid_axes` describes the other arguments.
    """
    axes = grid_axes(grid, interval, scale)
    return Block(start, axes, int(axes.max()) + 1)


def grid_axes(grid: Grid, interval: float, scale: float) -> NDArray[np.int64]:
    """Return the positions in a grid, [3, tokens].

    Args:
        grid: Number of tokens along each axis.
        interval: Distance between two steps on the time axis.
        scale: Factor for all time positions. The factor is applied after the interval, as in the references, because
            the order affects rounding.

    """
    axes: NDArray[np.int64] = np.indices(grid).reshape(3, -1)
    axes[0] = axes[0].astype(np.float32) * np.float32(interval) * np.float32(scale)
    return axes


def positions_of(num_tokens: int, blocks: Iterable[Block]) -> Positions:
    """Return the positions of a prompt with `blocks`, in ascending order. All other tokens are text."""
    positions = np.empty((3, num_tokens), np.int64)
    index = next_position = 0
    for block in blocks:
        start, stop = block.start, block.start + block.axes.shape[1]
        assert index <= start < stop <= num_tokens, (index, start, stop, num_tokens)
        positions[:, index:start] = np.arange(next_position, next_position + start - index)
        next_position += start - index
        positions[:, start:stop] = block.axes + next_position
        next_position += block.after
        index = stop
    positions[:, index:] = np.arange(next_position, next_position + num_tokens - index)
    return Positions(torch.from_numpy(positions), int(positions.max(initial=-1)) + 1 - num_tokens)
