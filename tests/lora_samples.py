"""LoRA adapters with random weights, and the models that result if they are merged into the base model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams

PREFIX = "base_model.model."


def linear_names(module: Any) -> list[str]:
    """Return the names of the plain linear layers of an unprepared model, except the output layer and experts."""
    head = module.get_output_embeddings()
    return [
        name
        for name, part in module.named_modules()
        if type(part) is nn.Linear and part is not head and ".experts." not in name
    ]


def write_adapter(
    folder: Path,
    module: Any,
    names: Collection[str],
    *,
    seed: int = 0,
    rank: int = 3,
    alpha: float = 6.0,
    whole: Iterable[str] = (),
    biases: Iterable[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    **config: Any,
) -> Path:
    """Write an adapter that changes the layers `names` of a model, as peft's save_pretrained does.

    Args:
        folder: Folder to create.
        module: The model, with the names of transformers.
        names: Linear layers to change.
        seed: Seed of the weights.
        rank: Rank of layers that `rank_pattern` in `config` does not name.
        alpha: The setting lora_alpha.
        whole: Layers whose weights are replaced (modules_to_save).
        biases: Layers whose biases are replaced.
        rename: Regular expressions and replacements for the names in the file.
        config: Further settings.

    """
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        outputs, inputs = module.get_submodule(name).weight.shape
        own = _pattern(config.get("rank_pattern"), name, rank)
        tensors[f"{name}.lora_A.weight"] = values(own, inputs) / math.sqrt(inputs)
        tensors[f"{name}.lora_B.weight"] = values(outputs, own) / math.sqrt(own)
        if config.get("lora_bias"):
            tensors[f"{name}.lora_B.bias"] = values(outputs) / 10
        if config.get("use_dora"):
            norm = module.get_submodule(name).weight.float().cpu().norm(dim=1)
            tensors[f"{name}.lora_magnitude_vector"] = norm * (1 + values(outputs).abs() / 3)
    for name in whole:
        tensors[f"{name}.weight"] = (
            module.get_submodule(name).weight.float() + values(*module.get_submodule(name).weight.shape) / 10
        )
    for name in biases:
        tensors[f"{name}.bias"] = values(*module.get_submodule(name).bias.shape) / 10
    stored = {PREFIX + _renamed(name, rename): tensor.contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True)
    save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "base_model_name_or_path": "tests/tiny", "r": rank, "lora_alpha": alpha, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(module: Any, folder: Path, rename: Sequence[tuple[str, str]] = ()) -> None:
    """Merge an adapter into an unprepared model by the formulas of the papers, in place.

    `rename` are regular expressions and replacements for the names in the file.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        name: tensor.to(module.device) for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name = _renamed(key.removeprefix(PREFIX), rename)
        layer, part = re.fullmatch(r"(.*?)\.((?:lora_\w+)(?:\.\w+)?|weight|bias)", name).groups()
        parts.setdefault(layer, {})[part] = tensor
    with torch.no_grad():
        for layer, own in parts.items():
            _merge_layer(module.get_submodule(layer), layer, own, config)


def _merge_layer(part: Any, layer: str, own: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    if "weight" in own:
        part.weight = nn.Parameter(own["weight"].to(part.weight.dtype), requires_grad=False)  # not of a tied layer
    if "bias" in own:
        part.bias.copy_(own["bias"])
    if "lora_A.weight" not in own:
        return
    rank = _pattern(config.get("rank_pattern"), layer, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), layer, config["lora_alpha"])
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    changed = part.weight + scaling * own["lora_B.weight"] @ own["lora_A.weight"]
    if "lora_magnitude_vector" in own:
        changed = changed * (own["lora_magnitude_vector"] / changed.norm(dim=1)).unsqueeze(1)
    part.weight.copy_(changed)
    if "lora_B.bias" in own:
        added = scaling * own["lora_B.bias"]
        part.bias = nn.Parameter(added if part.bias is None else part.bias + added, requires_grad=False)


def _pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    found = (value for key, value in (pattern or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return next(found, default)


def _renamed(name: str, rename: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rename:
        name = re.sub(pattern, replacement, name)
    return name


def scored(
    engine: BaseEngine, requests: Sequence[tuple[torch.Tensor, str | None]], **settings: Any
) -> list[tuple[list[int], list[float]]]:
    """Run prompts with the keys of their adapters in one batch. Return the tokens of each and their log-probabilities.

    The log-probabilities are those of the five likeliest tokens at each position.
    """
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    params = {"temperature": 0, "logprobs": 5, "max_tokens": 6, "ignore_eos": True, **settings}
    for number, (ids, key) in enumerate(requests):
        failure = engine.add(Add(str(number), ids.numpy().tobytes(), SamplingParams(lora=key, **params), float(number)))
        assert failure is None, failure
    while engine.has_work():
        for progress in engine.step().progress:
            assert progress.error is None, progress.error
            number = int(progress.request_id)
            tokens[number] += progress.token_ids
            logprobs[number] += [value for one in progress.logprobs or () for _, value in one.top]
    return list(zip(tokens, logprobs, strict=True))


def assert_close(found: Sequence[tuple[list[int], list[float]]], expected: Sequence[tuple[list[int], list[float]]]):
    """Assert that the tokens of each request are equal, and that the log-probabilities differ by at most 1e-3."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-3, atol=1e-3)
