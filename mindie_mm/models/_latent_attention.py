"""Multi-head latent attention (MLA) over the paged KV cache.

Source: DeepSeek-V2 (arXiv 2405.04434). A layer caches one short latent for the keys and values of all heads. The
projections of the heads are applied to the query and to the result instead of to the latent. The KV cache therefore has
a single key head of width rotary + latent, and its value is the latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import QuantizedLinear
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.attention import paged_attention
from mindie_mm.nn.layers import RMSNorm, rotate, split_heads
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import KVLayer

_LATENT_EPS = 1e-6  # epsilon of the latent's norm, which no setting changes


def latent_layer(config: Mapping[str, Any]) -> KVLayer:
    """Return the description of the cache entry that a layer keeps for each token.

    `config` is the configuration of the decoder.
    """
    return KVLayer(1, config["qk_rope_head_dim"] + config["kv_lora_rank"], config["kv_lora_rank"])


class LatentAttention(nn.Module):
    """A layer of multi-head latent attention. Parameters have the names of the published weights."""

    def __init__(self, layer: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.layer = layer
        self.latent: int = config["kv_lora_rank"]
        self.plain: int = config["qk_nope_head_dim"]
        self.rotary_width: int = config["qk_rope_head_dim"]
        self.scaling = (self.plain + self.rotary_width) ** -0.5
        self.interleaved: bool = config.get("rope_interleave", True)
        """True if adjacent numbers of a head are rotated together, instead of numbers of its two halves."""
        value, query_width = config["v_head_dim"], self.heads * (self.plain + self.rotary_width)
        rank = config["q_lora_rank"]
        if rank is None:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(rank, query_width, bias=False)
        self.low_rank = rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent + self.rotary_width, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, _LATENT_EPS)
        self.kv_b_proj = nn.Module()  # a module without forward, because its weight is split before use
        self.kv_b_proj.register_parameter(
            "weight", nn.Parameter(torch.empty(self.heads * (self.plain + value), self.latent))
        )
        self.o_proj = nn.Linear(self.heads * value, width, bias=False)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], paged: PagedBatch) -> Tensor:
        """Run the layer on rows [T, hidden].

        Args:
            hidden: [T, hidden].
            angles: Cosines and sines of the rotary embedding, [T, qk_rope_head_dim // 2] each.
            paged: The tokens that each row attends to, and the KV cache.

        Returns:
            [T, hidden].

        """
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))) if self.low_rank else self.q_proj(hidden)
        plain, rotated = split_heads(query, self.plain + self.rotary_width).split([self.plain, self.rotary_width], -1)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split([self.latent, self.rotary_width], -1)
        latent = self.kv_a_layernorm(latent).unsqueeze(0)
        by_head = self.kv_b_proj.get_parameter("weight").unflatten(0, (self.heads, -1))
        of_keys, of_values = by_head.tensor_split([self.plain], dim=1)
        query = torch.cat([self._rotate(rotated, angles), plain @ of_keys], -1)
        key = torch.cat([self._rotate(shared.unsqueeze(0), angles), latent], -1)
        mixed = paged_attention(self.layer, query, key, latent, paged, self.scaling).transpose(0, 1)
        projected: Tensor = self.o_proj((mixed @ of_values.transpose(1, 2)).transpose(0, 1).flatten(1))
        return projected

    def _rotate(self, values: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        if self.interleaved:  # first elements of all pairs, then second elements
            values = torch.cat([values[..., ::2], values[..., 1::2]], dim=-1)
        return rotate(values, *angles)


class PretrainedLatentAttention(LatentAttention):
    """A layer with the weights and the interface of transformers' `DeepseekV3Attention`, which caches all heads."""

    def __init__(self, own: Any) -> None:
        """Take the weights of `own`.

        Raises:
            UnsupportedCheckpoint: The projection that would be applied to the latent is quantized, and transformers
                loaded its weight.

        """
        with torch.device("meta"):
            super().__init__(own.layer_idx, own.config.to_dict())
        weight: Tensor = own.kv_b_proj.weight
        if isinstance(own.kv_b_proj, QuantizedLinear):
            weight = weight.to(own.kv_a_layernorm.weight.dtype)
        elif type(own.kv_b_proj) is not nn.Linear or not weight.is_floating_point():
            raise UnsupportedCheckpoint(
                f"the weight kv_b_proj of layer {own.layer_idx} is quantized, which is not supported in latent "
                "attention; use a checkpoint whose self_attn.kv_b_proj is not quantized"
            )
        self.scaling = own.scaling
        for name, part in own.named_children():
            setattr(self, name, part)
        self.kv_b_proj = nn.Module()
        self.kv_b_proj.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], paged: PagedBatch, **_: Any
    ) -> tuple[Tensor, None]:
        """Run the layer with the arguments that transformers passes.

        Args:
            hidden_states: [1, T, hidden].
            position_embeddings: Cosines and sines of the rotary embedding, [1, T, qk_rope_head_dim] each.
            paged: The tokens that each row attends to, and the KV cache.

        Returns:
            [1, T, hidden], and None for the attention weights.

        """
        half = self.rotary_width // 2  # both halves have the same angles
        cos, sin = (part[0, :, :half] for part in position_embeddings)
        return super().forward(hidden_states[0], (cos, sin), paged).unsqueeze(0), None


def replace_latent_attention(layers: nn.ModuleList) -> None:
    """Replace the attention of the layers of a transformers decoder of the DeepSeek-V3 kind."""
    for layer in layers:
        layer.self_attn = PretrainedLatentAttention(layer.self_attn)
