"""Network of Qwen-VL: a vision transformer, a resampler and the decoder."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu

from mindie_mm.nn.attention import paged_attention
from mindie_mm.nn.layers import RMSNorm, rotate, split_heads
from mindie_mm.nn.paged_batch import PagedBatch

_HEAD_WIDTH = 128  # width of the resampler's heads in all checkpoints
_TOWER_EPS = 1e-6


def resize_grid(table: Tensor, count: int) -> Tensor:
    """Resize a table [n, width] over a square grid to [count, width], float32. Both `n` and `count` must be squares."""
    side, target = math.isqrt(len(table)), math.isqrt(count)
    grid = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    if side != target:
        grid = interpolate(grid, size=(target, target), mode="bicubic", align_corners=False)
    return grid[0].flatten(1).T


class _TowerAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        # The query, key and value of a head are adjacent.
        heads = self.in_proj(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(*heads.chunk(3, dim=-1))
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class _TowerBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, _TOWER_EPS)
        self.attn = _TowerAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width, _TOWER_EPS)
        layers = {"c_fc": nn.Linear(width, inner), "gelu": nn.GELU(), "c_proj": nn.Linear(inner, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        mixed: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return mixed


class _Resampler(nn.Module):
    """Cross-attention from a fixed number of learned queries to the patches of an image."""

    def __init__(self, num_queries: int, width: int, out: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(num_queries, out))
        self.pos_embed = nn.Parameter(torch.empty(num_queries, out))
        self.kv_proj = nn.Linear(width, out, bias=False) if width != out else nn.Identity()
        self.attn = nn.MultiheadAttention(out, out // _HEAD_WIDTH, batch_first=True)
        self.ln_q = nn.LayerNorm(out, _TOWER_EPS)
        self.ln_kv = nn.LayerNorm(out, _TOWER_EPS)

    def forward(self, patches: Tensor) -> Tensor:
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + resize_grid(self.pos_embed, patches.shape[1]).to(values.dtype)
        queries = (self.ln_q(self.query) + self.pos_embed).expand(len(patches), -1, -1)
        mixed: Tensor = self.attn(queries, keys, values, need_weights=False)[0]
        return mixed


class _Tower(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, out, patch = config["width"], config["output_dim"], config["patch_size"]
        inner = int(width * config["mlp_ratio"])
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.positional_embedding = nn.Parameter(torch.empty(256, width))
        self.ln_pre = nn.LayerNorm(width, _TOWER_EPS)
        self.transformer = nn.ModuleDict(
            {"resblocks": nn.ModuleList(_TowerBlock(width, config["heads"], inner) for _ in range(config["layers"]))}
        )
        self.attn_pool = _Resampler(config["n_queries"], width, out)
        self.ln_post = nn.LayerNorm(out, _TOWER_EPS)
        self.proj = nn.Parameter(torch.empty(out, out))

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [n, 3, size, size] to features [n, queries, output_dim]."""
        hidden = self.conv1(pixels).flatten(2).transpose(1, 2)
        hidden = self.ln_pre(hidden + resize_grid(self.positional_embedding, hidden.shape[1]).to(hidden.dtype))
        for block in self.transformer["resblocks"].children():
            hidden = block(hidden)
        features: Tensor = self.ln_post(self.attn_pool(hidden)) @ self.proj
        return features


class _Attention(nn.Module):
    def __init__(self, layer: int, width: int, head_dim: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], query_scale: Tensor, paged: PagedBatch) -> Tensor:
        query, key, value = (split_heads(part, self.head_dim) for part in self.c_attn(hidden).chunk(3, dim=-1))
        query, key = rotate(query, *angles) * query_scale.to(query.dtype), rotate(key, *angles)
        mixed = paged_attention(self.layer, query, key, value, paged, self.head_dim**-0.5)
        projected: Tensor = self.c_proj(mixed.flatten(1))
        return projected


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(width, inner, bias=False)
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(self.w1(hidden) * silu(self.w2(hidden)))
        return projected


class _Block(nn.Module):
    def __init__(self, layer: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.ln_1 = RMSNorm(width, eps)
        self.attn = _Attention(layer, width, config["kv_channels"])
        self.ln_2 = RMSNorm(width, eps)
        self.mlp = _MLP(width, config["intermediate_size"] // 2)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], query_scale: Tensor, paged: PagedBatch) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), angles, query_scale, paged)
        mixed: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return mixed


class Network(nn.Module):
    """The whole network. Parameters have the names of the published weights."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, size = config["hidden_size"], config["vocab_size"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(size, width),
                "h": nn.ModuleList(_Block(i, config) for i in range(config["num_hidden_layers"])),
                "ln_f": RMSNorm(width, config["layer_norm_epsilon"]),
                "visual": _Tower(config["visual"]),
            }
        )
        self.lm_head = nn.Linear(width, size, bias=False)
