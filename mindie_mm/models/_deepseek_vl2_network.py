"""Network of DeepSeek-VL2: a SigLIP tower, a projector, and a decoder with plain or latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from mindie_mm.models._latent_attention import LatentAttention
from mindie_mm.nn.attention import paged_attention
from mindie_mm.nn.experts import Experts, GatedMLP
from mindie_mm.nn.layers import RMSNorm, rotate, split_heads
from mindie_mm.nn.paged_batch import PagedBatch


class _TowerBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.act = nn.GELU("tanh")

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attn["qkv"](self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        hidden = hidden + self.attn["proj"](mixed)
        added: Tensor = self.mlp["fc2"](self.act(self.mlp["fc1"](self.norm2(hidden))))
        return hidden + added


class _Tower(nn.Module):
    """A SigLIP tower without its pooling head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, patch = config["width"], config["patch_size"]
        inner, heads = int(width * config["mlp_ratio"]), config["heads"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.pos_embed = nn.Parameter(torch.empty(1, (384 // patch) ** 2, width))
        self.blocks = nn.Sequential(*(_TowerBlock(width, heads, inner) for _ in range(config["layers"])))
        self.norm = nn.LayerNorm(width, 1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [tiles, 3, size, size] to [tiles, patches, width]."""
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        hidden: Tensor = self.norm(self.blocks(patches + self.pos_embed))
        return hidden


class _Projector(nn.Module):
    """The projector, which turns each square of 2 x 2 patches into one feature."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["n_embed"]
        first = nn.Linear(4 * config["input_dim"], width)
        self.layers = nn.Sequential(first, nn.GELU(), nn.Linear(width, width))

    def forward(self, patches: Tensor) -> Tensor:
        """Map [tiles, patches, width] to [tiles, side * side, n_embed]."""
        side = math.isqrt(patches.shape[1])
        grid = patches.transpose(1, 2).unflatten(-1, (side, side))
        grid = pad(grid, (0, side % 2, 0, side % 2))
        # unfold makes the four values of each channel adjacent, as the weights require.
        windows = nn.functional.unfold(grid, 2, stride=2).transpose(1, 2)
        features: Tensor = self.layers(windows)
        return features


class _Attention(nn.Module):
    """Plain attention with a key and a value per head or per group of heads."""

    def __init__(self, layer: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.layer, self.head_dim = layer, width // heads
        kv_width = (config["num_key_value_heads"] or heads) * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], paged: PagedBatch) -> Tensor:
        query, key, value = (
            split_heads(project(hidden), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *angles), rotate(key, *angles)
        mixed = paged_attention(self.layer, query, key, value, paged, self.head_dim**-0.5)
        projected: Tensor = self.o_proj(mixed.flatten(1))
        return projected


class Gate(nn.Module):
    """The router, which chooses the experts of each token. It computes in float32."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        experts = config["n_routed_experts"]
        self.weight = nn.Parameter(torch.empty(experts, config["hidden_size"]))
        self.method = config.get("topk_method", "greedy")
        if self.method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(torch.empty(experts))
        self.softmax = config.get("scoring_func", "softmax") == "softmax"
        self.count: int = config["num_experts_per_tok"]
        self.groups: int = config.get("n_group") or 1
        self.kept_groups: int = config.get("topk_group") or 1
        self.normalised = self.count > 1 and config.get("norm_topk_prob", False)
        self.factor: float = config.get("routed_scaling_factor", 1.0)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for [T, width]. Return their weights (float32) and indices (int64), [T, count] each."""
        logits = linear(hidden.float(), self.weight.float())
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        chosen = self._ranked(scores).topk(self.count, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return the scores that decide which experts are chosen. Scores in dropped groups are minus infinity."""
        if self.method == "greedy":
            return scores
        ranked = scores + self.e_score_correction_bias.float() if self.method == "noaux_tc" else scores
        grouped = ranked.unflatten(-1, (self.groups, -1))
        by_group = grouped.topk(2 if self.method == "noaux_tc" else 1, dim=-1).values.sum(-1)
        kept = by_group.topk(self.kept_groups, dim=-1).indices
        dropped = torch.ones_like(by_group, dtype=torch.bool).scatter_(1, kept, value=False)
        masked: Tensor = grouped.masked_fill(dropped.unsqueeze(-1), -math.inf)
        return masked.flatten(1)


class MixtureOfExperts(nn.Module):
    """A layer with routed experts and, in some models, shared experts (DeepSeekMoE, Dai et al., 2024)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = Experts(GatedMLP(width, inner) for _ in range(config["n_routed_experts"]))
        shared = config.get("n_shared_experts")
        self.shared_experts = GatedMLP(width, inner * shared) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden)
        mixed: Tensor = self.experts(hidden, chosen, weights)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)


class _Block(nn.Module):
    def __init__(self, layer: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        sparse = (
            config["n_routed_experts"] is not None
            and layer >= config["first_k_dense_replace"]
            and layer % config["moe_layer_freq"] == 0
        )
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = (LatentAttention if config["use_mla"] else _Attention)(layer, config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MixtureOfExperts(config) if sparse else GatedMLP(width, config["intermediate_size"])

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], paged: PagedBatch) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, paged)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class _Decoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(_Block(i, config) for i in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(width, config["rms_norm_eps"])


class _Language(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)


class Network(nn.Module):
    """The whole network. Parameters have the names of the published weights, including a misspelled name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["projector_config"]["n_embed"]
        self.vision = _Tower(config["vision_config"])
        self.projector = _Projector(config["projector_config"])
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_seperator = nn.Parameter(torch.empty(width))
        self.language = _Language(config["language_config"])
