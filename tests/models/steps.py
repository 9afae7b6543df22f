"""Decode steps of a model without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindie_mm.nn.paged_batch import Chunk, PagedBatch


def step_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last token of `ids`, computed in a step after the others."""
    cache, length = model.spec.allocate_cache(-(-len(ids) // 16), 16), len(ids)
    blocks, positions = range(-(-length // 16)), model.positions(length, ()).prompt
    for start, stop in ((0, length - 1), (length - 1, length)):
        paged = PagedBatch([Chunk(start, stop, blocks)], cache, torch.device("cpu"), stop - 1)
        states = model.states(ids[start:stop], positions[:, start:stop], (), paged, None)
    logits: Tensor = model.head(states[-1:])
    return logits[0]
