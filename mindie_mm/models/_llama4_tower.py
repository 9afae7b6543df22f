"""Attention of Llama 4's tower with real numbers. NPUs hardly support the complex numbers of transformers' layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import upload


def with_real_tower(cls: type[Any]) -> type[Any]:
    """Return a subclass of transformers' class of the whole model, whose tower rotates with real numbers."""

    def init(self: Any, config: Any) -> None:
        cls.__init__(self, config)
        tower = self.vision_model
        tower.rotary_embedding = _Angles(tower.rotary_embedding)
        for layer in tower.model.layers:
            layer.self_attn = _Attention(layer.self_attn)

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


class _Angles(nn.Module):
    """The angles of the patches of a tile and of the token that represents the whole tile."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._compute, self._config = embedding._compute_freqs_ci, embedding.config  # noqa: SLF001
        self._known: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [patches + 1, 1, head_dim // 2] each, on the device of `pixels`."""
        if pixels.device not in self._known:
            angles = self._compute(self._config)
            self._known[pixels.device] = upload(angles.real, pixels.device), upload(angles.imag, pixels.device)
        return self._known[pixels.device]


class _Attention(nn.Module):
    """An attention layer with the weights of transformers' layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.config = layer.config
        self.scaling: float = layer.scaling
        self.head_dim: int = layer.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj

    def forward(self, hidden_states: Tensor, freqs_ci: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        """Run the layer on [tiles, patches + 1, width], and return the same shape."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # late: the import takes seconds

        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (part(hidden_states).unflatten(-1, (-1, self.head_dim)) for part in projections)
        heads = (part.transpose(1, 2) for part in (rotated(query, *freqs_ci), rotated(key, *freqs_ci), value))
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # noqa: SLF001 - there is no public name
        attended, _weights = attention(self, *heads, None, scaling=self.scaling, is_causal=False)
        return self.o_proj(attended.flatten(2)), None


def rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., T, heads, head_dim]. Each element with an even index pairs with the next element.

    Args:
        values: Queries or keys.
        cos: Cosines of the angles, float32 [T, 1, head_dim // 2].
        sin: Sines of the angles, float32 [T, 1, head_dim // 2].

    """
    even, odd = values.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(values.dtype)
