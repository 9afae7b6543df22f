"""Short convolutions of LFM2 over a flat batch, in place of transformers' layers, which compute one sequence at a time.

Source: arXiv 2511.23404. A layer keeps the last gated inputs of its convolution for each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mindie_mm.models._causal_conv import causal_conv
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import StateLayer

LAYER_TYPE = "conv"
"""Type of these layers in `layer_types` of config.json."""
TP_PLAN: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.out_proj": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
}
"""Tensor-parallel plan. Each rank computes all short convolutions."""
OTHER_KEYS = words(
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads rope_theta theta use_pos_enc"
)
"""Keys of the text model in published config.json files. They repeat other keys, or initialize the training."""


def short_conv_state(text: Any) -> StateLayer:
    """Return the description of the state that a layer keeps for each sequence.

    `text` is the configuration of the text model.
    """
    return StateLayer(shapes=((text.hidden_size, text.conv_L_cache - 1),), dtypes=(text.dtype,))


def replace_short_convs(layers: nn.ModuleList) -> None:
    """Replace the short convolutions of a text model."""
    for layer in layers:
        if not layer.is_attention_layer:
            layer.conv = ShortConv(layer.conv)


class ShortConv(nn.Module):
    """A gated short convolution with the weights of transformers' layer."""

    def __init__(self, layer: Any) -> None:
        """Take the weights of `layer`."""
        super().__init__()
        self.layer: int = layer.layer_idx
        self.in_proj, self.conv, self.out_proj = layer.in_proj, layer.conv, layer.out_proj

    def forward(self, hidden_states: Tensor, *, paged: PagedBatch, **_: Any) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: [1, T, hidden].
            paged: The sequences of the batch, and their states.

        Returns:
            [1, T, hidden].

        """
        before, after, values = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        kept = None if paged.cache is None else paged.cache.states[self.layer][0]
        projected: Tensor = self.out_proj(after * causal_conv(self.conv, before * values, paged.states, kept))
        return projected.unsqueeze(0)
