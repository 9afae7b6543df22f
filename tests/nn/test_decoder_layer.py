"""Tests for the layers that replace transformers' decoder layers on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from mindie_mm.device import Uploads
from mindie_mm.device.cpu.cpu_kernels import CPUKernels
from mindie_mm.device.kernels import Rows
from mindie_mm.nn import attention, experts
from mindie_mm.nn.decoder_layer import DecoderLayer, fuse
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from mindie_mm.nn.paged_cache import KVLayer, PagedCache

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LENGTH = 11
WINDOW = 4


def text_model(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a transformers text model with paged attention and random weights, including norms and biases."""
    torch.manual_seed(0)
    AttentionInterface.register(attention.NAME, attention.attend)
    config = getattr(transformers, f"{name}Config")(**SIZES | settings, attn_implementation=attention.NAME)
    model = getattr(transformers, f"{name}Model")(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.05)
    experts.arrange(model.to(dtype))
    return model


def states(model: Any, paged: PagedBatch, positions: Tensor) -> Tensor:
    hidden = torch.randn(1, len(positions), SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out = model(
            inputs_embeds=hidden.to(model.dtype), position_ids=positions.unsqueeze(0), use_cache=False, paged=paged
        )
    result: Tensor = out.last_hidden_state[0]
    return result


def whole(model: Any) -> Tensor:
    """Return the states of one sequence without a cache."""
    return states(model, PagedBatch([Chunk(0, LENGTH, ())], None, torch.device("cpu")), torch.arange(LENGTH))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": False}),
    "llama with chunks": ("Llama", {"layer_types": [attention.CHUNKED, "full_attention"], "attention_chunk_size": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "norms after the rotation": ("HunYuanDenseV1", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "mistral with a window": ("Mistral", {"sliding_window": WINDOW}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "experts in every other layer": ("Qwen3Moe", {"mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MODELS)
def test_replaced_layers_give_the_same_results(case: str, dtype: torch.dtype) -> None:
    name, settings = MODELS[case]
    model = text_model(name, dtype, **settings)
    expected = whole(model)
    assert fuse(model) == SIZES["num_hidden_layers"]
    assert all(isinstance(layer, DecoderLayer) for layer in model.layers)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(whole(model), expected, rtol=tolerance, atol=tolerance)


class Zero(nn.Module):
    """A layer without a product, as a stand-in for a packed or quantized layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.num_outputs = linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), self.num_outputs)


def test_linear_layers_of_a_replaced_layer_can_be_replaced() -> None:
    model = text_model("Llama")
    fuse(model)
    layer, hidden = model.layers[0], torch.randn(1, LENGTH, SIZES["hidden_size"])
    arguments: dict[str, Any] = {
        "position_embeddings": (torch.ones(1, LENGTH, 16), torch.zeros(1, LENGTH, 16)),
        "paged": PagedBatch([Chunk(0, LENGTH, ())], None, torch.device("cpu")),
    }
    assert not torch.allclose(layer(hidden, **arguments), hidden)
    layer.gate_up = Zero(layer.gate_up)  # the MLP adds nothing
    for name in ("qkv", "output"):  # nor does the attention
        own = getattr(layer, name)
        setattr(layer, name, Zero(own))
        torch.testing.assert_close(layer(hidden, **arguments), hidden)
        setattr(layer, name, own)


def test_windows_limit_the_attention_of_replaced_layers() -> None:
    narrow, wide = (text_model("Mistral", sliding_window=window) for window in (WINDOW, None))
    for model in (narrow, wide):
        assert fuse(model) == SIZES["num_hidden_layers"]
    assert not torch.allclose(whole(narrow)[-1], whole(wide)[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Gemma3Text", {}),  # four norms per layer, whose weights are offsets from 1
        ("Cohere", {}),  # LayerNorm, and attention beside the MLP
        ("Granite", {"residual_multiplier": 0.5}),  # the parts of Llama, but other factors
        ("Granite", {"attention_multiplier": 0.5, "residual_multiplier": 0.25}),
        ("Helium", {}),  # rotates pairs of neighboring elements
        ("Glm4Moe", {"first_k_dense_replace": 2}),  # rotates a part of each head
        ("Phi3", {}),  # products that are already joined
    ],
)
def test_layers_that_compute_something_else_are_kept(name: str, settings: dict[str, Any]) -> None:
    settings = {**settings, "pad_token_id": 0} if name == "Phi3" else settings
    model = text_model(name, **settings)
    kinds, expected = [type(layer) for layer in model.layers], whole(model)
    assert fuse(model) == 0
    assert [type(layer) for layer in model.layers] == kinds
    assert torch.equal(whole(model), expected)


def test_a_changed_layer_is_kept() -> None:
    """Keep layers with hooks, a replaced forward, another class of linear layer, or another attention."""

    class Quantized(nn.Linear):
        pass

    changes = {
        "hook": lambda layer: layer.mlp.down_proj.register_forward_pre_hook(lambda *_: None),
        "forward": lambda layer: setattr(layer.mlp, "forward", layer.mlp.forward),
        "class": lambda layer: setattr(layer.self_attn, "k_proj", Quantized(64, 32, bias=False)),
        "norm": lambda layer: layer.self_attn.register_module("q_norm", nn.RMSNorm(16)),
        "norms over all heads": lambda layer: (
            layer.self_attn.register_module("q_norm", nn.RMSNorm(64)),
            layer.self_attn.register_module("k_norm", nn.RMSNorm(32)),
        ),
        "attention": lambda layer: setattr(layer.self_attn.config, "_attn_implementation", "sdpa"),
        "dtype": lambda layer: layer.half(),
    }
    for name, change in changes.items():
        model = text_model("Llama")
        change(model.layers[0])
        fuse(model)
        assert not isinstance(model.layers[0], DecoderLayer), name


@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_decode_steps_over_pages_equal_whole_sequences(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(name)
    fuse(model)
    size, lengths = 4, (LENGTH, 5, 8)
    blocks: list[list[int]] = [[0, 1, 2], [3, 4], [5, 6]] if order == "consecutive" else [[6, 0, 5], [2, 4], [3, 1]]
    cache = PagedCache.allocate(
        [KVLayer(2, 16)] * 2,
        num_blocks=7,
        block_size=size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    monkeypatch.setattr("mindie_mm.device.cpu.cpu_kernels._MIN_BYTES", 0)
    if order == "consecutive":
        for pages in (*cache.keys.values(), *cache.values.values()):
            pages.fill_(torch.nan)  # pages that are read in place are read up to their last token
    hidden = [torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)) for n in lengths]

    def run(chunks: list[Chunk], rows: list[Tensor], cache: PagedCache | None) -> Tensor:
        positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        with torch.inference_mode():
            out = model(
                inputs_embeds=torch.cat(rows, 1),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                paged=PagedBatch(chunks, cache, torch.device("cpu")),
            )
        result: Tensor = out.last_hidden_state[0]
        return result

    expected = [run([Chunk(0, n, ())], [one], None) for n, one in zip(lengths, hidden, strict=True)]
    for n, one, held in zip(lengths, hidden, blocks, strict=True):
        run([Chunk(0, n - 1, held)], [one[:, : n - 1]], cache)
    steps = [Chunk(n - 1, n, held) for n, held in zip(lengths, blocks, strict=True)]
    together = run(steps, [one[:, -1:] for one in hidden], cache)
    torch.testing.assert_close(together, torch.stack([one[-1] for one in expected]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "length", "is_fused"),
    [
        ([[2, 3]], 7, True),
        ([[3, 2]], 7, False),
        ([[2, 3], [4, 5]], 7, False),
        ([[2, 3], [4, 5]], 8, True),
        ([[2, 3], [5, 4]], 8, False),
    ],
)
def test_pages_are_read_in_place_if_they_are_consecutive_and_large_enough(
    blocks: list[list[int]], length: int, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(blocks)
    rows = Rows.build([1] * count, [length] * count, blocks, 4, Uploads(torch.device("cpu")))
    keys = torch.randn(6, 4, 2, 8)
    values, query = torch.randn_like(keys), torch.randn(4, count, 8)
    monkeypatch.setattr("mindie_mm.device.cpu.cpu_kernels._MIN_BYTES", 8 * 2 * (8 + 8) * 4)
    assert CPUKernels().attends(query, keys, values, rows) == is_fused
    if not is_fused:
        return
    out = CPUKernels().attend(query, keys, values, rows, 0.3)
    for number, held in enumerate(blocks):
        key, value = (pages[held].flatten(0, 1)[:length].repeat_interleave(2, 1) for pages in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", query[:, number], key) * 0.3).softmax(-1)
        torch.testing.assert_close(out[number], torch.einsum("hl,lhd->hd", weights, value))
