"""Parts that Gemma 3 and later Gemma models share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mindie_mm.nn.splice import MediaItem


def spans_of(length: int, items: Sequence[MediaItem]) -> Tensor | None:
    """Return `Model.bidirectional_spans` with a span for each run of adjacent placeholders of `items`."""
    if not items:
        return None
    slots = np.concatenate([item.slots for item in items])
    span_ids = torch.full((length,), -1)
    span_ids[slots] = torch.from_numpy(np.cumsum(np.diff(slots, prepend=-2) != 1) - 1)
    return span_ids


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return the logits between -cap and cap, or unchanged if `cap` is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
