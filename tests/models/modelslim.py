"""A writer of small checkpoints in ModelSlim's format, and models of the same numbers in floating point.

The formulas are those of msmodelslim's save/ascendv1.py, save/utils/pack.py and save/utils/deqscale.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
STATIC_SCALE, STATIC_OFFSET = 0.0625, -3.0
"""Constants of rounded inputs. Inputs of the small models are below 8."""


@dataclass(frozen=True)
class Rounded:
    """A quantized layer as ordinary numbers."""

    weight: torch.Tensor
    kind: str


def rounded_input(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the input of a layer after rounding, as ordinary numbers."""
    values = rows.float().numpy()
    if kind == "W8A8":
        numbers = np.clip(np.rint(values / np.float32(STATIC_SCALE) + np.float32(STATIC_OFFSET)), -128, 127)
        return torch.from_numpy((numbers - np.float32(STATIC_OFFSET)) * np.float32(STATIC_SCALE)).to(rows.dtype)
    if kind == "W8A16":
        return rows
    scales = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(values / scales) * scales).to(rows.dtype)


def quantize(
    folder: Path,
    kind_of: Callable[[str, torch.Tensor], str | None],
    *,
    types: bool = True,
    older: bool = False,
    wide_scales: bool = False,
    shards: int = 1,
) -> tuple[Weights, list[Rounded]]:
    """Quantize the checkpoint `folder` in place.

    Args:
        folder: The checkpoint. Its weights are replaced.
        kind_of: Function from the name and value of a weight to the type of its layer. None keeps the weight.
        types: Whether to write the description.
        older: Whether to name the files as older releases do.
        wide_scales: Whether deq_scale is int64, as for models in float16.
        shards: Number of weight files.

    Returns:
        All weights as ordinary numbers, and the quantized weights among them.
    """
    file = folder / "model.safetensors"
    plain = load_file(file)
    stored: Weights = {}
    description: dict[str, Any] = {}
    layers = []
    for name, weight in list(plain.items()):
        if (kind := kind_of(name, weight)) is None:
            stored[name] = weight
            description.setdefault(name, "FLOAT")
            continue
        layer = name.removesuffix(".weight")
        parts, plain[name] = _parts(kind, weight)
        if kind == "W8A8":
            numbers, deq = parts["weight"].numpy().astype(np.float64), parts["deq_scale"].numpy()
            bias = plain.get(f"{layer}.bias", torch.zeros(len(weight))).float().numpy()
            shift = STATIC_OFFSET * numbers.sum(1)
            quant_bias = np.rint(bias / deq - shift).astype(np.int32)
            parts["quant_bias"] = torch.from_numpy(quant_bias)
            if f"{layer}.bias" in plain:
                plain[f"{layer}.bias"] = torch.from_numpy(((quant_bias + shift) * deq).astype(np.float32))
            if wide_scales:
                bits = deq.view(np.uint32).astype(np.int64)
                parts["deq_scale"] = torch.from_numpy(bits)
        stored |= {f"{layer}.{part}": value for part, value in parts.items()}
        description |= dict.fromkeys((f"{layer}.{part}" for part in parts), kind)
        layers.append(Rounded(plain[name], kind))
    description |= {"version": "1.0.0", "model_quant_type": "W8A8", "group_size": 0, "metadata": {}}
    file.unlink()
    _write(folder, stored, "quant_model_weight_w8a8" if older else "quant_model_weights", shards)
    if types:
        name = "quant_model_description_w8a8.json" if older else "quant_model_description.json"
        (folder / name).write_text(json.dumps(description))
    return plain, layers


def _parts(kind: str, weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """Return the stored tensors of a layer, and its weight as ordinary numbers."""
    values = weight.float().numpy()
    largest = 7 if kind == "W4A8_DYNAMIC" else 127
    scales = (np.abs(values).max(1, keepdims=True) / largest).astype(np.float32)
    offsets = np.zeros_like(scales)
    if kind == "W8A16":
        scales = ((values.max(1, keepdims=True) - values.min(1, keepdims=True)) / 255).astype(np.float32)
        offsets = np.rint(-128 - values.min(1, keepdims=True) / scales).astype(np.float32)
    numbers = np.clip(np.rint(values / scales + offsets), -128 if kind == "W8A16" else -largest, largest)
    plain = torch.from_numpy((numbers - offsets) * scales)
    stored = numbers.astype(np.int8)
    if kind == "W8A8":
        deq = (np.float32(STATIC_SCALE) * scales[:, 0]).astype(np.float32)
        constants = {"input_scale": torch.tensor([STATIC_SCALE]), "input_offset": torch.tensor([STATIC_OFFSET])}
        return {"weight": torch.from_numpy(stored), "deq_scale": torch.from_numpy(deq), **constants}, plain
    dynamic = {"weight_scale": torch.from_numpy(scales), "weight_offset": torch.from_numpy(offsets)}
    if kind == "W4A8_DYNAMIC":
        low, high = stored[0::2] & 15, stored[1::2] & 15
        packed = (low | (high << 4)).astype(np.int8)
        shifts = 8 * (numbers * scales).sum(1, keepdims=True).astype(np.float32)
        return {"weight": torch.from_numpy(packed), "scale_bias": torch.from_numpy(shifts), **dynamic}, plain
    if kind == "W8A8_MIX":
        static = {"input_scale": torch.tensor([STATIC_SCALE]), "input_offset": torch.tensor([STATIC_OFFSET])}
        static |= {
            "deq_scale": torch.from_numpy(scales[:, 0] * np.float32(STATIC_SCALE)),
            "quant_bias": torch.zeros(len(weight)).int(),
        }
        dynamic |= static
    return {"weight": torch.from_numpy(stored), **dynamic}, plain


def _write(folder: Path, stored: Mapping[str, torch.Tensor], name: str, shards: int) -> None:
    whole = {key: value.contiguous() for key, value in stored.items()}
    if shards == 1:
        save_file(whole, folder / f"{name}.safetensors", {"format": "pt"})
        return
    index = {}
    for number in range(shards):
        file = f"{name}-{number + 1:05}-of-{shards:05}.safetensors"
        own = {key: whole[key] for key in [*whole][number::shards]}
        save_file(own, folder / file, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def round_inputs(module: torch.nn.Module, layers: list[Rounded]) -> int:
    """Round the inputs of the layers of a model in floating point. Return the number of these layers."""
    count = 0
    for linear in module.modules():
        if isinstance(linear, torch.nn.Linear):
            for layer in layers:
                rows = len(layer.weight)  # a layer of gates and values begins with the gates
                if linear.weight[:rows].shape == layer.weight.shape and linear.weight[:rows].equal(layer.weight):
                    linear.register_forward_pre_hook(_rounding(layer.kind))
                    count += len(linear.weight) // rows
    return count


def _rounding(kind: str) -> Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    return lambda _, args: (rounded_input(args[0], kind), *args[1:])
