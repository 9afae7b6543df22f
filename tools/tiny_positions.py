"""Qwen2-VL's own rule for positions in place of transformers', for training and for judging by transformers.

transformers 5.23 lets the text behind a video begin before the video's last moment; the server does not, and the
checkpoint must be trained as it is served. See docs/decisions.md.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers.models.qwen2_vl import modeling_qwen2_vl

from mindie_mm.nn.mrope import Grid, mrope_positions


def _get_rope_index(
    self: Any,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    image_grid_thw: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the method that it replaces: int64 [3, B, T] and [B, 1]. Rows are padded on the right, if at all."""
    merge = self.config.vision_config.spatial_merge_size
    grids = {
        kind: iter([] if found is None else found.tolist())
        for kind, found in ((1, image_grid_thw), (2, video_grid_thw))
    }
    positions, deltas = [], []
    for kinds in mm_token_type_ids.tolist():
        spans: list[tuple[int, int, Grid]] = []
        start = 0
        for kind, run in groupby(kinds):
            stop = start + len(list(run))
            if kind:
                t, h, w = next(grids[kind])
                spans.append((start, stop, (t, h // merge, w // merge)))
            start = stop
        placed = mrope_positions(len(kinds), spans)
        positions.append(placed.prompt)
        deltas.append(placed.delta)
    return torch.stack(positions, dim=1).to(input_ids.device), torch.tensor(deltas, device=input_ids.device)[:, None]


def use_papers_positions() -> None:
    """From here on, transformers' Qwen2-VL places tokens as the paper does."""
    modeling_qwen2_vl.Qwen2VLModel.get_rope_index = _get_rope_index
