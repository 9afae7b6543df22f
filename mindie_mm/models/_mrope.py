"""Three-axis rotary positions (M-RoPE): time, height and width of every token.

Source: Qwen2-VL (arXiv 2409.12191, section 2.1). Text has the same position on all axes and goes on by one. The
tokens of a medium count its grid from one past the largest position before it, and the text behind it starts at one
past the largest position of all three axes. (transformers 5.23 leaves the time axis out of that maximum.)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import torch

from mindie_mm.nn.model import Positions

Grid = tuple[int, int, int]
"""Tokens along time, height and width: after merging."""


def mrope_positions(
    num_tokens: int,
    spans: Iterable[tuple[int, int, Grid]],
    intervals: Iterable[float] | None = None,
    scale: float = 1.0,
) -> Positions:
    """Positions of a prompt on the axes t, h, w; `spans` are (start, stop, grid) of each media run, ascending.

    `intervals`, one for each span, are positions from one time of its grid to the next, in float32 and rounded down
    where a token stands; None: 1. A time is multiplied by them first and by `scale` then, as references round it.
    """
    positions = np.empty((3, num_tokens), np.int64)
    index = next_position = 0
    for (start, stop, grid), interval in zip(spans, repeat(1.0) if intervals is None else intervals, strict=False):
        assert index <= start < stop <= num_tokens, (index, start, stop, num_tokens)
        assert stop - start == grid[0] * grid[1] * grid[2], (start, stop, grid)
        positions[:, index:start] = np.arange(next_position, next_position + start - index)
        next_position += start - index
        axes = np.indices(grid).reshape(3, -1)
        axes[0] = axes[0].astype(np.float32) * np.float32(interval) * np.float32(scale)
        positions[:, start:stop] = axes + next_position
        next_position += int(axes.max()) + 1
        index = stop
    positions[:, index:] = np.arange(next_position, next_position + num_tokens - index)
    return Positions(torch.from_numpy(positions), next_position - index)
