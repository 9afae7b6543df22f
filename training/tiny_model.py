"""The embedded checkpoint's model: initialized at random or from a Qwen2-VL, faster for training, and saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

# Special tokens whose names differ between the two models.
RENAMED = {
    "<|vision_start|>": "<|vision_bos|>",
    "<|vision_end|>": "<|vision_eos|>",
    "<|image_pad|>": "<|IMAGE|>",
    "<|video_pad|>": "<|VIDEO|>",
}
# quick_gelu(x) is silu(QUICK * x) / QUICK.
QUICK = 1.702


def _attend_by_length(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: object,
) -> torch.Tensor:
    """Replace the vision attention's `forward`. Windows of equal size share one call."""
    total = hidden_states.shape[0]
    q, k, v = (part(hidden_states).view(total, self.num_heads, -1) for part in (self.q, self.k, self.v))
    q, k = modeling.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    lengths = cu_seqlens.diff()
    out = torch.empty_like(v)
    for length in lengths.unique().tolist():
        starts = cu_seqlens[:-1][lengths == length]
        rows = (starts[:, None] + torch.arange(length)).view(-1)
        q1, k1, v1 = (x[rows].view(len(starts), length, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        attended = scaled_dot_product_attention(q1, k1, v1).transpose(1, 2)
        out = out.index_copy(0, rows, attended.reshape(len(rows), self.num_heads, -1))
    merged: torch.Tensor = self.proj(out.reshape(total, -1))
    return merged


def _attend_padded(self: Any, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **_: object) -> torch.Tensor:
    """Replace the audio attention's `forward`. All clips share one call, padded to the longest."""
    lengths = cu_seqlens.diff()
    real = torch.arange(int(lengths.max())) < lengths[:, None]

    def rows(part: nn.Linear) -> torch.Tensor:
        clips = pad_sequence(list(part(hidden_states).split(lengths.tolist())), batch_first=True)
        return clips.view(*clips.shape[:2], self.num_heads, -1).transpose(1, 2)

    attended = scaled_dot_product_attention(
        rows(self.q_proj), rows(self.k_proj), rows(self.v_proj), attn_mask=real[:, None, None, :]
    )
    merged: torch.Tensor = self.out_proj(attended.transpose(1, 2).flatten(2)[real])
    return merged


def _embed_by_product(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Replace the patch embedding's `forward` by one matrix product. The windows of its convolution never overlap."""
    return linear(hidden_states, self.proj.weight.view(self.embed_dim, -1))


def build_model(path: Path) -> Any:
    """Build a model from the layout's configuration. Each matrix has random weights of variance 2 / (in + out)."""
    config = Qwen2_5OmniThinkerConfig.from_pretrained(path)
    config.dtype = torch.float32
    model = Qwen2_5OmniThinkerForConditionalGeneration(config).float()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv3d)):
            weight = module.weight
            nn.init.normal_(weight, std=math.sqrt(2 / (weight[0].numel() + weight.shape[0])))
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def use_fast_towers() -> None:
    """Install the faster `forward` methods in transformers' towers, for the whole process."""
    modeling.Qwen2_5OmniVisionAttention.forward = _attend_by_length
    modeling.Qwen2_5OmniAudioAttention.forward = _attend_padded
    modeling.Qwen2_5_VisionPatchEmbed.forward = _embed_by_product


def start_from(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Initialize the model from a Qwen2-VL of the same sizes: vision tower, language model and token embeddings.

    The tower computes the same result for every image that fits into one window. Three changes achieve this. Weights
    that write to the residual stream lose their mean, so that RMSNorm equals LayerNorm. LayerNorm's offsets move into
    the biases that follow. A gate that is always open turns SwiGLU into an MLP with QuickGELU.
    """
    old = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    new = dict(model.state_dict())
    for name, value in old.items():
        if name.startswith("model.layers.") or name == "model.norm.weight":
            new[name.replace("model.", "model.language_model.", 1)] = value
    words, old_embedding = Tokenizer.from_file(str(folder / "tokenizer.json")), old["model.embed_tokens.weight"]
    embedding = new["model.language_model.embed_tokens.weight"].clone()
    before = {RENAMED.get(token, token): i for token, i in words.get_vocab().items()}
    for token, i in tokenizer.get_vocab().items():
        if token in before:
            embedding[i] = old_embedding[before[token]]
        elif not token.startswith("<|"):
            text = tokenizer.decode([i])
            embedding[i] = old_embedding[words.encode(text, add_special_tokens=False).ids].mean(0)
    embedding += 0.02 * torch.randn_like(embedding) * (embedding != 0)
    new["model.language_model.embed_tokens.weight"] = new["lm_head.weight"] = embedding
    new |= {f"model.{name}": value for name, value in _tower(old).items()}
    model.load_state_dict(new)
    model.tie_weights()


def _without_mean(value: torch.Tensor) -> torch.Tensor:
    return value - value.mean(0, keepdim=True)


def _after(norm: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the bias of a matrix after the offset of its input's LayerNorm has been moved into this bias."""
    return bias + weight @ norm.repeat(weight.shape[1] // len(norm))


def _tower(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the weights of a Qwen2-VL's vision tower for Qwen2.5-Omni's tower."""
    new = {"visual.patch_embed.proj.weight": _without_mean(old["visual.patch_embed.proj.weight"])}
    depth = sum(name.endswith("attn.qkv.weight") for name in old)
    for i in range(depth):
        block = f"visual.blocks.{i}."

        def take(name: str, block: str = block) -> torch.Tensor:
            return old[block + name]

        weight = take("attn.qkv.weight")
        bias = _after(take("norm1.bias"), weight, take("attn.qkv.bias"))
        for part, w, b in zip("qkv", weight.chunk(3), bias.chunk(3), strict=True):
            new |= {f"{block}attn.{part}.weight": w, f"{block}attn.{part}.bias": b}
        for kind in ("weight", "bias"):
            new[f"{block}attn.proj.{kind}"] = _without_mean(take(f"attn.proj.{kind}"))
            new[f"{block}mlp.down_proj.{kind}"] = _without_mean(take(f"mlp.fc2.{kind}"))
        inner = take("mlp.fc1.weight")
        gate_bias = QUICK * _after(take("norm2.bias"), inner, take("mlp.fc1.bias"))
        new |= {f"{block}mlp.gate_proj.weight": QUICK * inner, f"{block}mlp.gate_proj.bias": gate_bias}
        new[f"{block}mlp.up_proj.weight"] = torch.zeros_like(inner)
        new[f"{block}mlp.up_proj.bias"] = torch.full((len(inner),), 1 / QUICK)
        new |= {f"{block}norm{n}.weight": take(f"norm{n}.weight") for n in (1, 2)}
    weight, bias = old["visual.merger.mlp.0.weight"], old["visual.merger.mlp.0.bias"]
    new["visual.merger.ln_q.weight"] = old["visual.merger.ln_q.weight"]
    new["visual.merger.mlp.0.weight"] = weight
    new["visual.merger.mlp.0.bias"] = _after(old["visual.merger.ln_q.bias"], weight, bias)
    new |= {f"visual.merger.mlp.2.{kind}": old[f"visual.merger.mlp.2.{kind}"] for kind in ("weight", "bias")}
    return new


def save(model: Any, path: Path) -> None:
    """Save the weights in one file as bfloat16. A tied head is not saved twice."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    names = {_stored(name): value.to(torch.bfloat16) for name, value in state.items()}
    target = path / "model.safetensors"
    part = target.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in names.items()}, part, metadata={"format": "pt"})
    part.replace(target)


def _stored(name: str) -> str:
    """Return a weight's name in the checkpoint of a thinker."""
    for tower in ("audio_tower", "visual"):
        name = name.replace(f"model.{tower}.", f"{tower}.")
    return name.replace("model.language_model.", "model.")
