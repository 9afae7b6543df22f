"""Layers of Llama 4's decoder over a flat batch, in place of transformers' layers.

transformers' layers rotate with complex numbers, which NPUs hardly support, scale queries by their index in the batch,
and run all experts for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from mindie_mm.device import kernels_of
from mindie_mm.models._llama4_tower import rotated
from mindie_mm.nn.attention import attend
from mindie_mm.nn.experts import experts_of
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.split_linear import num_shares


def replace_layers(text_model: Any) -> None:
    """Replace the attention and the mixtures of experts of a loaded text model."""
    text_model.rotary_emb = _Places(text_model.rotary_emb)
    for layer in text_model.layers:
        layer.self_attn = _Attention(layer.self_attn)
        if layer.is_moe_layer:
            layer.feed_forward = _Mixture(layer.feed_forward)


@dataclass(frozen=True, slots=True)
class _Place:
    """Data for the attention layers about the positions of T tokens."""

    cos: Tensor
    """Cosines of the rotary embedding, float32 [T, 1, head_dim // 2]."""
    sin: Tensor
    """Sines of the rotary embedding, float32 [T, 1, head_dim // 2]."""
    temperature: Tensor
    """Factor of the queries in layers without rotary embedding, float32 [T, 1, 1]."""


class _Places(nn.Module):
    """The rotary embedding, and the temperature of later positions (Nakanishi, 2025, arXiv 2501.19399)."""

    def __init__(self, rotary_emb: Any) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(rotary_emb.inv_freq, persistent=False)
        self._scaling: float = rotary_emb.attention_scaling
        self._text = rotary_emb.config

    def forward(self, hidden: Tensor, position_ids: Tensor) -> _Place:
        positions = position_ids[0].float().unsqueeze(1)
        angles = (positions * self.inv_freq).unsqueeze(1)
        steps = torch.floor((positions + 1) / self._text.floor_scale)
        temperature = torch.log1p(steps) * self._text.attn_scale + 1
        return _Place(angles.cos() * self._scaling, angles.sin() * self._scaling, temperature.unsqueeze(1))


class _Attention(nn.Module):
    """An attention layer with the weights of transformers' layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer_idx: int = layer.layer_idx
        self.config = layer.config
        self.scaling: float = layer.scaling
        self.head_dim: int = layer.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        self.rotates = bool(layer.use_rope)
        self.norm = getattr(layer, "qk_norm", None)
        self.has_temperature = layer.attn_temperature_tuning and not self.rotates

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: _Place, paged: PagedBatch, **_: Any
    ) -> tuple[Tensor, None]:
        """Run the layer on [1, T, hidden], and return [1, T, hidden]."""
        place, hidden = position_embeddings, hidden_states[0]
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (projection(hidden).view(len(hidden), -1, self.head_dim) for projection in projections)
        if self.rotates:
            query, key = (rotated(part, place.cos, place.sin) for part in (query, key))
        if self.norm is not None:
            query, key = self.norm(query), self.norm(key)
        if self.has_temperature:
            query = (query * place.temperature).to(query.dtype)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attended, _weights = attend(self, query, key, value, None, scaling=self.scaling, paged=paged)
        return self.o_proj(attended.flatten(2)), None


class _Mixture(nn.Module):
    """A mixture of experts whose inputs, not outputs, have weights, and an expert that all tokens share."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router, self.shared_expert = layer.router, layer.shared_expert
        experts = layer.experts
        first, second = (weight.detach().transpose(1, 2) for weight in (experts.gate_up_proj, experts.down_proj))
        # transformers sets this attribute if each rank has some of the experts.
        start = dist.get_rank() * len(first) if getattr(experts, "_is_expert_parallel", False) else None
        self.experts = experts_of(first, second, kernels_of(first.device).swiglu, start)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Run the layer on [1, T, hidden]. Return [1, T, hidden], and None for the scores of the router."""
        hidden = hidden_states[0]
        scores, chosen = torch.topk(linear(hidden, self.router.weight), self.router.top_k)
        weights = scores.float().sigmoid().to(hidden.dtype)
        rows = (hidden.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)  # a row for each expert of each token
        mixed = self.experts(rows, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        if num_shares() > 1:
            dist.all_reduce(mixed)
        mixed = mixed.view(*chosen.shape, -1).sum(1)
        return self.shared_expert(hidden_states).add_(mixed), None
