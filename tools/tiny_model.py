"""The embedded checkpoint's model: made afresh, sped up for training, written to its file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl import modeling_qwen2_vl


def _attend_by_length(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: object,
) -> torch.Tensor:
    """`VisionAttention.forward` with all pictures of one size in one call, not one call each."""
    total = hidden_states.shape[0]
    qkv = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1)
    q, k, v = qkv.unbind(1)
    q, k = modeling_qwen2_vl.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    lengths = cu_seqlens.diff()
    out = torch.empty_like(v)
    for length in lengths.unique().tolist():
        starts = cu_seqlens[:-1][lengths == length]
        rows = (starts[:, None] + torch.arange(length)).view(-1)
        q1, k1, v1 = (x[rows].view(len(starts), length, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        found = scaled_dot_product_attention(q1, k1, v1).transpose(1, 2)
        out = out.index_copy(0, rows, found.reshape(len(rows), self.num_heads, -1))
    merged: torch.Tensor = self.proj(out.reshape(total, -1))
    return merged


def _embed_by_product(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """`PatchEmbed.forward` as one matrix product: the convolution never overlaps."""
    return linear(hidden_states, self.proj.weight.view(self.embed_dim, -1))


def build_model(path: Path) -> Any:
    """A fresh model by the layout's configuration, every matrix of variance 2 / (in + out)."""
    config = Qwen2VLConfig.from_pretrained(path)
    config.dtype = torch.float32
    model = Qwen2VLForConditionalGeneration(config).float()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv3d)):
            weight = module.weight
            nn.init.normal_(weight, std=math.sqrt(2 / (weight[0].numel() + weight.shape[0])))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def use_fast_tower() -> None:
    """From here on, transformers' vision tower takes the two short cuts above."""
    modeling_qwen2_vl.VisionAttention.forward = _attend_by_length
    modeling_qwen2_vl.PatchEmbed.forward = _embed_by_product


def save(model: Any, path: Path) -> None:
    """The weights as bfloat16, in one file; the tied head is not written twice."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    names = {_stored(name): value.to(torch.bfloat16) for name, value in state.items()}
    target = path / "model.safetensors"
    part = target.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in names.items()}, part, metadata={"format": "pt"})
    part.replace(target)


def _stored(name: str) -> str:
    """A weight's name in Qwen2-VL's published checkpoints."""
    name = name.replace("model.language_model.", "model.")
    return name.replace("model.visual.", "visual.")
