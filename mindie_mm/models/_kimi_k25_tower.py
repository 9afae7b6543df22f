"""MoonViT-3D, the vision tower of Kimi K2.5, for images and for chunks of up to four frames.

Source: arXiv 2602.02276.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mindie_mm.device import upload
from mindie_mm.nn.layers import PatchProjection


class Tower(nn.Module):
    """The tower, with the weights of transformers' `Kimi_K25VisionModel`.

    transformers fails for chunks with different numbers of frames. It also derives position embeddings and the mean
    over frames from sizes on the device.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        embed = tower.patch_embed
        self.project = PatchProjection(embed.proj)
        self.positions: nn.Parameter = embed.pos_emb.position_embeddings
        self.times: Tensor
        self.register_buffer("times", embed.pos_emb.time_position_embeddings.float(), persistent=False)
        self.rotary, self.layers, self.norm = tower.rotary_emb, tower.layers, tower.final_layernorm
        self.merge: int = tower.merge_kernel_size[0]

    def forward(self, patches: Tensor, chunks: Tensor) -> Tensor:
        """Run the tower.

        Args:
            patches: [n, 3 * patch * patch].
            chunks: Frames, rows and columns of each chunk, int64 [chunks, 3], preferably on the host.

        Returns:
            Mean over the frames of each square of patches that becomes a token, [features, merge * merge, width].

        """
        from transformers.vision_utils import get_vision_position_ids  # imported late, because it is slow to import

        chunks = chunks.cpu()  # on the host, unless the tower has a placement of its own, which moves its arguments
        sizes: list[tuple[int, int, int]] = [(t, h, w) for t, h, w in chunks.tolist()]
        hidden = self.project(patches)
        hidden = hidden + self._embeddings(sizes).to(hidden.dtype)
        angles = self.rotary(hidden, upload(get_vision_position_ids(chunks, 1), hidden.device))
        bounds = nn.functional.pad(chunks.prod(-1).cumsum(0), (1, 0))
        for layer in self.layers:
            hidden = layer(hidden, cu_seqlens=bounds, position_embeddings=angles)
        rows = self.norm(hidden).split([math.prod(size) for size in sizes])
        return torch.cat([self._pooled(*pair) for pair in zip(rows, sizes, strict=True)])

    def _embeddings(self, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the position embeddings of all patches, float32 [n, width]."""
        by_size = {(h, w): self._resampled(h, w) for _, h, w in sizes}
        parts = []
        for t, h, w in sizes:
            spatial = by_size[h, w]
            # The first row of `times` is zero, and a chunk of one frame has no time.
            parts.append(spatial if t == 1 else (spatial + self.times[1 : t + 1].unsqueeze(1)).flatten(0, 1))
        return torch.cat(parts)

    def _resampled(self, height: int, width: int) -> Tensor:
        """Return the learned embeddings resampled to `height` x `width` patches, float32 [height * width, width].

        A bicubic interpolation is a matrix product along each axis. The tensor of all neighbors would be large.
        """
        table, device = self.positions.float(), self.positions.device
        side = table.shape[0]
        rows, columns = (upload(_interpolation(count, side), device) for count in (height, width))
        lines = (rows @ table.flatten(1)).unflatten(1, (side, -1))
        resampled: Tensor = (columns @ lines).flatten(0, 1)
        return resampled

    def _pooled(self, rows: Tensor, size: tuple[int, int, int]) -> Tensor:
        t, h, w = size
        mean = rows if t == 1 else rows.unflatten(0, (t, h * w)).mean(0)
        squares = mean.view(h // self.merge, self.merge, w // self.merge, self.merge, -1).transpose(1, 2)
        return squares.flatten(2, 3).flatten(0, 1)


def _interpolation(count: int, side: int) -> Tensor:
    """Return the weights of a bicubic interpolation from `side` to `count` numbers, float32 [count, side]."""
    return interpolate(torch.eye(side)[None, None], (count, side), mode="bicubic")[0, 0]
