"""Conversion between the layouts of fused attention and a list of sequences [heads, tokens, dim]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split(tensor: Tensor, layout: str, heads: int, stops: Sequence[int] | None) -> list[Tensor]:
    """Split a tensor into sequences [heads, tokens, dim]. For packed layouts, `stops` contains the sequences' ends."""
    if layout in {"TND", "NTD"}:
        rows = tensor.transpose(0, 1) if layout == "TND" else tensor
        assert stops is not None
        return [rows[:, start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    if layout == "BNSD":
        return list(tensor)
    if layout == "SBH":
        tensor, layout = tensor.transpose(0, 1), "BSH"
    if layout == "BSH":
        tensor = tensor.unflatten(-1, (heads, -1))
    return list(tensor.transpose(1, 2))  # BSND


def join(parts: Sequence[Tensor], layout: str, tokens: int | None = None) -> Tensor:
    """Join sequences into a tensor, as the inverse of `split`.

    A packed layout is padded with zeros to `tokens` rows.
    """
    if layout in {"TND", "NTD"}:
        rows = torch.cat(list(parts), dim=1)
        if tokens is not None and tokens > rows.shape[1]:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, tokens - rows.shape[1]))
        return rows.transpose(0, 1).contiguous() if layout == "TND" else rows
    whole = torch.stack(list(parts))  # BNSD
    if layout == "BNSD":
        return whole
    if layout == "NBSD":
        return whole.transpose(0, 1).contiguous()
    whole = whole.transpose(1, 2)  # BSND
    if layout == "BSND":
        return whole.contiguous()
    whole = whole.flatten(2)
    return whole.transpose(0, 1).contiguous() if layout == "SBH" else whole


def pages_of(pages: Tensor, table: Tensor, length: int, heads: int, block_size: int) -> Tensor:
    """Return the first `length` tokens of a sequence as [heads, length, dim]. `table` lists its blocks.

    `pages` has the shape [blocks, block_size, heads * dim], [blocks, heads, block_size, dim] or, in the NZ format,
    [blocks, heads, dim / 16, block_size, 16].
    """
    count = -(-length // block_size)
    which = table[:count].long()
    if count and not 0 <= int(which.min()) <= int(which.max()) < len(pages):
        # The device does not check block numbers, and would read arbitrary memory.
        raise RuntimeError(f"block_table names the blocks {which.tolist()}, the cache has {len(pages)}")
    if pages.dim() == 3:
        blocks = pages[which].unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)
    elif pages.dim() == 4:
        blocks = pages[which].transpose(0, 1)
    else:
        blocks = pages[which].permute(1, 0, 3, 2, 4).flatten(3)
    return blocks.flatten(1, 2)[:, :length]
