"""Tests for the context length for each type of rotary frequencies. The expected values are those of vLLM."""

from __future__ import annotations

import json
import shutil
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaConfig, Qwen2VLForConditionalGeneration

from mindie_mm.nn.checkpoint.resolved import context_length
from tests.warm import running_service

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        (YARN, 1024),
        ({**YARN, "original_max_position_embeddings": 128}, 512),
        ({**YARN, "factor": 1.5}, 384),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            },
            256,
        ),
        (
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            },
            256,
        ),
        # vLLM multiplies dynamic frequencies, too. Here, they are replaced by default frequencies.
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 256),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_the_context_depends_on_the_type_of_rotary_frequencies(rope: dict[str, Any], expected: int) -> None:
    config = LlamaConfig(
        max_position_embeddings=256, hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope
    )
    assert context_length(config) == expected


def test_frequencies_per_type_of_layer_leave_the_context_as_it_is() -> None:
    """Such checkpoints state the context with the factor."""
    config = LlamaConfig(max_position_embeddings=256)
    config.rope_parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert context_length(config) == 256


def test_a_prompt_beyond_the_original_context_is_served_as_in_transformers(random_checkpoint, tmp_path) -> None:
    folder = shutil.copytree(random_checkpoint, tmp_path / "yarn")
    config = json.loads((folder / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    yarn = {**rope, **YARN, "original_max_position_embeddings": 256}
    yarn["type"] = yarn.pop("rope_type")  # the old names, as in published checkpoints
    config["text_config"] |= {"max_position_embeddings": 256, "rope_scaling": yarn}
    (folder / "config.json").write_text(json.dumps(config))
    prompt = torch.randint(10, 300, (1, 600), generator=torch.Generator().manual_seed(0))
    reference = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    rotary = reference.model.language_model.rotary_emb
    assert rotary.rope_type == "yarn"
    expected = reference.generate(prompt, max_new_tokens=8, do_sample=False)[0, 600:].tolist()
    body = {"prompt": prompt[0].tolist(), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "arena_bytes": 2**22,
        "kv_cache_bytes": 2**24,
    }
    with running_service(settings, tmp_path / "log", folder) as running:
        (model,) = httpx2.get(f"{running.url}/v1/models").json()["data"]
        assert model["max_model_len"] == 1024
        reply = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=300).json()
        assert reply["choices"][0]["token_ids"] == expected[: len(reply["choices"][0]["token_ids"])]
        assert reply["usage"]["prompt_tokens"] == 600
        assert reply["usage"]["completion_tokens"] >= 1
