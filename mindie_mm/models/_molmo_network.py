"""Network of Molmo, first generation: the vision backbone and the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.models._crops import Geometry
from mindie_mm.nn.attention import paged_attention
from mindie_mm.nn.layers import RMSNorm, rotate, split_heads
from mindie_mm.nn.paged_batch import PagedBatch

CROP, PATCH = 336, 14
"""Sides of a crop and of a patch, in pixels."""
CROPS = Geometry(CROP, 2 * PATCH, pooling=(1, 1), margins=(2, 2))
"""Geometry in cells. A cell is 2 x 2 patches, which are pooled to one feature before the crops are joined."""
CELLS = CROPS.patches
"""Cells along a side of a crop."""
POSITIONS = (CROP // PATCH) ** 2 + 1
"""Number of position embeddings: one for each patch of a crop and one for the class token."""


class Attention(nn.Module):
    """Multi-head attention of queries to a context, without a mask."""

    def __init__(self, width: int, inner: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(width, inner) for _ in range(3))
        self.wo = nn.Linear(inner, out)

    def forward(self, query: Tensor, context: Tensor) -> Tensor:
        """Map queries [n, q, width] and a context [n, k, width] to [n, q, out]."""
        q, k, v = (
            linear(values).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, values in ((self.wq, query), (self.wk, context), (self.wv, context))
        )
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.w1(hidden)
        out: Tensor = self.w2(inner * torch.sigmoid(1.702 * inner))  # "quick" GELU
        return out


class _VisionBlock(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["image_emb_dim"], config["image_num_heads"]
        self.attention = Attention(width, heads * config["image_head_dim"], width, heads)
        self.feed_forward = _FeedForward(width, config["image_mlp_dim"])
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(width, config["image_norm_eps"]) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed)
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class _VisionTransformer(nn.Module):
    """CLIP's vision transformer without its final norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["image_emb_dim"]
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(POSITIONS, width))
        self.patch_embedding = nn.Linear(PATCH * PATCH * 3, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, config["image_norm_eps"])
        blocks = [_VisionBlock(config) for _ in range(config["image_num_layers"])]
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(blocks)})

    def forward(self, patches: Tensor, layers: Sequence[int]) -> Tensor:
        """Map patches [n, patches, 588] to [n, patches, len(layers) * width], the outputs of `layers` concatenated."""
        hidden = self.patch_embedding(patches)
        hidden = torch.cat([self.class_embedding.expand(len(hidden), 1, -1), hidden], dim=1)
        hidden = self.pre_ln(hidden + self.positional_embedding)
        blocks = [*self.transformer["resblocks"].children()]
        wanted = [range(len(blocks))[layer] for layer in layers]
        features: dict[int, Tensor] = {}
        for index in range(max(wanted) + 1):  # checkpoints contain further blocks, whose output is unused
            hidden = blocks[index](hidden)
            features[index] = hidden
        return torch.cat([features[index][:, 1:] for index in wanted], dim=-1)


class _Projector(nn.Module):
    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, out, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return out


class VisionBackbone(nn.Module):
    """The vision transformer, the attention pooling and the projector, which turn crops into features."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision, self.layers = config["vision_backbone"], config["vit_layers"]
        width, heads = vision["image_emb_dim"], vision["image_num_heads"]
        wide = width * len(self.layers)
        self.image_vit = _VisionTransformer(vision)
        self.pad_embed = nn.Parameter(torch.empty(2, wide))
        self.image_pooling_2d = Attention(wide, heads * vision["image_head_dim"], width, heads)
        self.image_projector = _Projector(width, config["intermediate_size"] // 2, config["hidden_size"])

    def forward(self, patches: Tensor, padding: Tensor) -> Tensor:
        """Map normalized patches [n, patches, 588] and the result of `paddings` to features [n, cells, hidden]."""
        features = self.image_vit(patches, self.layers)
        features = features + F.pad(self.pad_embed, (0, 0, 1, 0))[padding]
        windows = (
            features.view(-1, CELLS, 2, CELLS, 2, features.shape[-1]).transpose(2, 3).reshape(-1, 4, features.shape[-1])
        )
        pooled = self.image_pooling_2d(windows.mean(1, keepdim=True), windows)
        out: Tensor = self.image_projector(pooled)
        return out.view(len(patches), CELLS**2, -1)


class _Embedding(nn.Module):
    """The embedding table of the language model, followed by a second table for Molmo's own tokens."""

    def __init__(self, size: int, further: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(size, width))
        self.new_embedding = nn.Parameter(torch.empty(further, width))

    def forward(self, ids: Tensor) -> Tensor:
        size = len(self.embedding)
        new = F.embedding((ids - size).clamp(min=0), self.new_embedding)
        return torch.where((ids < size).unsqueeze(-1), F.embedding(ids.clamp(max=size - 1), self.embedding), new)


class _Block(nn.Module):
    """A decoder layer, with norms before attention and feed-forward (7B-D) or after them (7B-O)."""

    def __init__(self, config: Mapping[str, Any], layer: int) -> None:
        super().__init__()
        width, heads, eps = config["hidden_size"], config["num_attention_heads"], config["layer_norm_eps"]
        self.layer, self.head_dim, self.theta = layer, width // heads, config["rope_theta"]
        self.norm_after: bool = config["norm_after"]
        self.clip: float | None = config["clip_qkv"]
        kv_width = config["num_key_value_heads"] * self.head_dim
        self.widths = (width, kv_width, kv_width)
        self.att_proj = nn.Linear(width, sum(self.widths), bias=config["qkv_bias"])
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj = nn.Linear(width, config["intermediate_size"], bias=False)
        self.ff_out = nn.Linear(config["intermediate_size"] // 2, width, bias=False)
        self.attn_norm, self.ff_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        normed = config["attention_layer_norm"]
        self.q_norm, self.k_norm = (RMSNorm(w, eps) if normed else nn.Identity() for w in self.widths[:2])

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, paged: PagedBatch) -> Tensor:
        if self.norm_after:
            hidden = hidden + self.attn_norm(self.attend(hidden, cos, sin, paged))
            out: Tensor = hidden + self.ff_norm(self.feed_forward(hidden))
            return out
        hidden = hidden + self.attend(self.attn_norm(hidden), cos, sin, paged)
        return hidden + self.feed_forward(self.ff_norm(hidden))

    def attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, paged: PagedBatch) -> Tensor:
        projected = self.att_proj(hidden)
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        query, key, value = projected.split(self.widths, dim=-1)
        q, k = (
            rotate(split_heads(norm(values), self.head_dim), cos, sin)
            for norm, values in ((self.q_norm, query), (self.k_norm, key))
        )
        v = split_heads(value, self.head_dim)
        out: Tensor = self.attn_out(paged_attention(self.layer, q, k, v, paged, self.head_dim**-0.5).flatten(1))
        return out

    def feed_forward(self, hidden: Tensor) -> Tensor:
        values, gate = self.ff_proj(hidden).chunk(2, dim=-1)
        out: Tensor = self.ff_out(F.silu(gate) * values)
        return out


class Transformer(nn.Module):
    """The embeddings, the decoder layers and the head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, size = config["hidden_size"], config["embedding_size"]
        self.wte = _Embedding(size, config["additional_vocab_size"], width)
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config["num_hidden_layers"]))
        self.ln_f = RMSNorm(width, config["layer_norm_eps"])
        self.ff_out = nn.Linear(width, size, bias=False)


class _Parts(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.transformer, self.vision_backbone = Transformer(config), VisionBackbone(config)


class Network(nn.Module):
    """The whole network. Parameters have the names of the original checkpoints."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = _Parts(config)
