"""Gated delta-net layers over a flat batch, in place of transformers' layers, which compute one sequence at a time.

Source: Gated Delta Networks (Yang et al., 2024, arXiv 2412.06464). A layer keeps two tensors for each sequence: the
last inputs of its convolution, and a recurrent state per head that maps keys to values.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from mindie_mm.models._causal_conv import causal_conv
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import StateLayer

LAYER_TYPE = "linear_attention"
"""Type of these layers in `layer_types` of config.json."""
OTHER_KEYS = (
    "text_config.attn_output_gate",
    "text_config.full_attention_interval",
    "text_config.mamba_ssm_dtype",
    "text_config.mlp_only_layers",
    "text_config.mtp_num_hidden_layers",
    "text_config.mtp_use_dedicated_embeddings",
    "text_config.partial_rotary_factor",
    "vision_config.deepstack_visual_indexes",
)
"""Keys of published config.json files that transformers' classes lack.

They describe parts that are not served, or repeat what these classes compute.
"""
_EPS = 1e-6


def delta_net_state(text: Any) -> StateLayer:
    """Return the description of the state that a layer keeps for each sequence.

    `text` is the configuration of the text model.
    """
    channels = 2 * text.linear_num_key_heads * text.linear_key_head_dim
    channels += text.linear_num_value_heads * text.linear_value_head_dim
    return StateLayer(
        shapes=(
            (channels, text.linear_conv_kernel_dim - 1),
            (text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim),
        ),
        # The recurrent state sums over all tokens, so that rounding it in each step would add up.
        dtypes=(text.dtype, torch.float32),
    )


def replace_delta_nets(layers: nn.ModuleList) -> None:
    """Replace the delta-net layers of a text model."""
    for layer in layers:
        if getattr(layer, "linear_attn", None) is not None:
            layer.linear_attn = GatedDeltaNet(layer.linear_attn)


class GatedDeltaNet(nn.Module):
    """A gated delta-net layer with the weights of transformers' layer."""

    def __init__(self, layer: Any) -> None:
        """Take the weights of `layer`."""
        from transformers.activations import ACT2FN  # late: the import takes seconds

        super().__init__()
        self.layer: int = layer.layer_idx
        self.in_proj_qkv, self.in_proj_z = layer.in_proj_qkv, layer.in_proj_z
        self.in_proj_b, self.in_proj_a = layer.in_proj_b, layer.in_proj_a
        self.conv1d, self.norm, self.out_proj = layer.conv1d, layer.norm, layer.out_proj
        self.dt_bias, self.A_log = layer.dt_bias, layer.A_log
        self.key_dim, self.value_dim = layer.head_k_dim, layer.head_v_dim
        # The wrapper around this function would use flash-linear-attention on any device, but that only supports GPUs.
        self.delta_rule = inspect.unwrap(sys.modules[type(layer).__module__].torch_chunk_gated_delta_rule)
        """Delta rule for the consecutive tokens of a sequence, in plain torch, from transformers."""
        self.activate = ACT2FN[layer.activation]
        self.num_key_heads, self.num_value_heads = layer.num_k_heads, layer.num_v_heads

    def forward(self, hidden_states: Tensor, *, paged: PagedBatch, **_: Any) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: [1, T, hidden].
            paged: The sequences of the batch, and their states.

        Returns:
            [1, T, hidden].

        """
        hidden, states = hidden_states[0], paged.states
        kept = None if paged.cache is None else paged.cache.states[self.layer]
        inputs = None if kept is None else kept[0]
        activated = self.activate(causal_conv(self.conv1d, self.in_proj_qkv(hidden), states, inputs))
        beta = self.in_proj_b(hidden).sigmoid()
        decay = -self.A_log.float().exp() * softplus(self.in_proj_a(hidden).float() + self.dt_bias)
        out = activated.new_empty(len(hidden), self.num_value_heads, self.value_dim)
        for prefill in states.prefills:
            rows = prefill.rows
            state = None if kept is None or prefill.reads is None else kept[1][prefill.reads].unsqueeze(0)
            out[rows], state = self._scan(activated[rows], decay[rows], beta[rows], state)
            if kept is not None:
                kept[1][prefill.writes] = state
        if kept is not None and len(states.rows):
            if states.prefills:  # otherwise, the rows are all rows in order
                activated, decay, beta = (part.index_select(0, states.rows) for part in (activated, decay, beta))
            stepped, state = self._step(activated, decay, beta, kept[1].index_select(0, states.reads))
            out.index_copy_(0, states.rows, stepped)
            kept[1].index_copy_(0, states.writes, state)
        gate = self.in_proj_z(hidden).view(-1, self.value_dim)
        normed = self.norm(out.flatten(0, 1), gate).view(len(hidden), -1)
        projected: Tensor = self.out_proj(normed)
        return projected.unsqueeze(0)

    def _heads(self, activated: Tensor) -> list[Tensor]:
        """Split rows [n, channels] into queries, keys and values, [n, heads, width] each."""
        width = self.num_key_heads * self.key_dim
        query, key, value = activated.split([width, width, self.num_value_heads * self.value_dim], dim=1)
        return [
            query.reshape(len(query), -1, self.key_dim),
            key.reshape(len(key), -1, self.key_dim),
            value.reshape(len(value), -1, self.value_dim),
        ]

    def _scan(self, activated: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the delta rule to the consecutive rows of one sequence. Return the outputs and the new state."""
        query, key, value = (part.unsqueeze(0) for part in self._heads(activated))
        out, state = self.delta_rule(
            query,
            key,
            value,
            g=decay.unsqueeze(0),
            beta=beta.unsqueeze(0),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state[0]

    def _step(self, activated: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the delta rule to one row of each sequence. `state` is overwritten."""
        query, key, value = (part.float() for part in self._heads(activated))
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS) for part in (query, key))
        query, key = (
            part.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=1).unsqueeze(2)
            for part in (query * self.key_dim**-0.5, key)
        )  # (S, heads, 1, width)
        factor = decay.exp()[..., None, None]
        # The state is much larger than all other tensors, so it is read once for the outputs and the change.
        read, known = (torch.cat([query, key], dim=2) @ state).mul_(factor).split(1, dim=2)
        change = (value.unsqueeze(2) - known) * beta.float()[..., None, None]
        state.mul_(factor).flatten(0, 1).baddbmm_(key.transpose(2, 3).flatten(0, 1), change.flatten(0, 1))
        out = read + (query * key).sum(-1, keepdim=True) * change
        return out.squeeze(2).to(activated.dtype), state
