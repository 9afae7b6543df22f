"""Reference attention for the fused operators: one sequence at a time, in float32, with the documented masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COMPRESSED = 2048
"""Side length of the mask for sparse modes 2 to 4, and for modes 6 to 8 of npu_fusion_attention.

The mask is 1 above the diagonal.
"""


@dataclass(frozen=True, slots=True)
class Sparse:
    """Rule that determines which keys a query sees. The mode determines from which corner positions are counted."""

    mode: int
    mask: Tensor | None
    """Mask, bool [B or 1, ..., Sq, Skv], in which leading axes may be missing. True hides a key."""
    before: int
    after: int

    def seen(self, item: int, queries: int, keys: int) -> Tensor | None:
        """Return which keys of the sequence `item` are visible, bool [heads or 1, queries, keys].

        None means all keys.
        """
        if self.mask is None and self.mode != 4:
            return None
        at = torch.arange(queries).unsqueeze(1)
        to = torch.arange(keys).unsqueeze(0)
        if self.mode in {0, 1}:
            assert self.mask is not None
            hidden = self.mask
            if hidden.dim() == 4:
                hidden = hidden[min(item, len(hidden) - 1)]
            elif hidden.dim() == 3:  # [B or 1, Sq, Skv]
                hidden = hidden[min(item, len(hidden) - 1)].unsqueeze(0)
            else:
                hidden = hidden.unsqueeze(0)
            seen = ~hidden[:, :queries, :keys].bool()
            if self.mode == 0:
                seen = seen & (to - at <= self.after) & (at - to <= self.before)
            return seen
        if self.mode == 2:
            return (to <= at).unsqueeze(0)
        at = at + keys - queries  # the last query aligns with the last key
        if self.mode == 3:
            return (to <= at).unsqueeze(0)
        return ((to - at <= self.after) & (at - to <= self.before)).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Attended:
    """Result of the attention of one sequence."""

    out: Tensor
    """Output, float32 [heads, queries, value_dim]."""
    largest: Tensor
    """Maximum of the scaled scores of each query, float32 [heads, queries]."""
    total: Tensor
    """Sum of exp(score - largest) of each query, float32 [heads, queries]."""

    @property
    def lse(self) -> Tensor:
        return self.total.log() + self.largest


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None, shift: Tensor | None
) -> Attended:
    """Attend with query [heads, queries, dim] to key [kv_heads, keys, dim] and value [kv_heads, keys, value_dim].

    The output is zero for a query that sees no keys, as in the modes in which the operator corrects such rows. For
    other modes, the documentation of the device does not define the output.
    """
    groups = query.shape[0] // key.shape[0]
    keys, values = (part.float().repeat_interleave(groups, dim=0) for part in (key, value))
    scores = query.float() @ keys.transpose(1, 2) * scale
    if shift is not None:
        scores = scores + shift.float()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(dim=-1) if scores.shape[-1] else torch.full(scores.shape[:2], -torch.inf)
    weights = (scores - largest.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    total = weights.sum(dim=-1)
    out = weights @ values / total.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return Attended(out, largest, total)


def lengths(cumulative: list[int]) -> list[int]:
    """Return the length of each sequence. `cumulative` contains the ends of the sequences."""
    return [stop - start for start, stop in zip([0, *cumulative], cumulative, strict=False)]
