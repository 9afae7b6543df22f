"""Writers of small checkpoints in the formats of compressed-tensors, GPTQ and AWQ.

Sources of the layouts: compressed-tensors (compressors/pack_quantized, int_quantized), GPTQModel
(nn_modules/qlinear, pack_block) and AutoAWQ (modules/linear/gemm.py, from_linear).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.models.modelslim import Rounded, Weights

INPUT_SCALE, INPUT_ZERO = 0.0625, -3
"""Constants of rounded inputs. Inputs of the small models are below 8."""
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs, of 8, in the order of the bits of an int32."""


@dataclass(frozen=True)
class Scheme:
    """How the writers quantize a weight."""

    bits: int = 4
    group: int | None = None
    """Number of inputs of a group. None means all inputs, and 0 means the whole weight."""
    symmetric: bool = True
    shuffled: bool = False
    """True if groups consist of inputs in a random order."""
    inputs: str | None = None
    """How inputs are rounded: dynamic, static, or not at all."""


def compressed(kind: str, scheme: Scheme, **changes: Any) -> dict[str, Any]:
    """Return a quantization_config as llm-compressor writes it."""
    strategies: dict[int | None, str] = {None: "channel", 0: "tensor"}
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "group_size": scheme.group,
    }
    weights["strategy"] = strategies.get(scheme.group, "group")
    inputs: dict[str, Any] | None = None
    if scheme.inputs:
        is_dynamic = scheme.inputs == "dynamic"
        inputs = {"num_bits": 8, "type": "int", "dynamic": is_dynamic, "strategy": "token" if is_dynamic else "tensor"}
        inputs["symmetric"] = is_dynamic
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head", "re:visual.*"]}
    return {**settings, "config_groups": {"group_0": group | changes}}


def quantized(weight: torch.Tensor, scheme: Scheme) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return unsigned numbers [outputs, inputs], scales and zero points [outputs, groups], and the group of inputs."""
    values = weight.float().numpy()
    rows, columns = values.shape
    size = scheme.group or columns
    group_of = np.arange(columns) // size
    if scheme.shuffled:
        group_of = np.random.default_rng(0).permutation(group_of)
    count, highest = columns // size, 2**scheme.bits - 1
    middle = 2 ** (scheme.bits - 1)
    scales, zeros = np.zeros((rows, count), np.float32), np.full((rows, count), middle)
    for number in range(count):
        own = values[:, group_of == number]
        if scheme.group == 0:
            own = values.reshape(1, -1)
        if scheme.symmetric:
            scales[:, number] = np.abs(own).max(1) / (middle - 1)
        else:
            low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
            scales[:, number] = (high - low) / highest
            zeros[:, number] = np.clip(np.rint(-low / scales[:, number]), 1, highest)
    scales = scales.astype(np.float16).astype(np.float32)  # published scales have 16 bits
    numbers = np.clip(np.rint(values / scales[:, group_of]) + zeros[:, group_of], 0, highest).astype(np.int64)
    return numbers, scales, zeros.astype(np.int64), group_of


def packed(numbers: NDArray[Any], bits: int) -> torch.Tensor:
    """Return unsigned numbers [rows, columns] packed along the columns, int32. Unused bits are 0."""
    each = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).astype(np.uint64)
    parts = padded.reshape(len(padded), -1, each) << (np.arange(each, dtype=np.uint64) * np.uint64(bits))
    return torch.from_numpy(np.bitwise_or.reduce(parts, 2).astype(np.uint32).view(np.int32).copy())


def int_quantized(weight: torch.Tensor, scheme: Scheme) -> Weights:
    numbers, scales, zeros, _ = quantized(weight, scheme)
    middle = 2 ** (scheme.bits - 1)
    parts = {
        "weight": torch.from_numpy((numbers - middle).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales if scheme.group != 0 else scales[0]).to(torch.bfloat16),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    if scheme.inputs == "static":
        parts["input_scale"] = torch.tensor([INPUT_SCALE])
        parts["input_zero_point"] = torch.tensor([INPUT_ZERO], dtype=torch.int8)
    return parts


def pack_quantized(weight: torch.Tensor, scheme: Scheme) -> Weights:
    numbers, scales, zeros, group_of = quantized(weight, scheme)
    parts = {
        "weight_packed": packed(numbers, scheme.bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = packed(zeros.T, scheme.bits).T
    if scheme.shuffled:
        parts["weight_g_idx"] = torch.from_numpy(group_of).int()
    return parts


def gptq(weight: torch.Tensor, scheme: Scheme, shift: int = 1) -> Weights:
    numbers, scales, zeros, group_of = quantized(weight, scheme)
    return {
        "qweight": packed(numbers, scheme.bits).T,
        "qzeros": packed(zeros.T - shift, scheme.bits),
        "scales": torch.from_numpy(scales.T).half(),
        "g_idx": torch.from_numpy(group_of).int(),
        "bias": torch.zeros(len(weight)).half(),
    }


def awq(weight: torch.Tensor, scheme: Scheme) -> Weights:
    numbers, scales, zeros, _ = quantized(weight, scheme)
    order = np.arange(len(weight)).reshape(-1, 8)[:, _AWQ].ravel()
    return {
        "qweight": packed(numbers[order].T, 4),
        "qzeros": packed(zeros[order].T, 4),
        "scales": torch.from_numpy(scales.T).half(),
    }


_LAYER = re.compile(r"(?!.*kv_b_proj).*\.\d+\..*\.weight")
"""Weights of numbered layers. Latent attention needs its kv_b_proj unquantized."""


def of_layers(name: str, weight: torch.Tensor) -> bool:
    """Return whether a weight is a matrix of a numbered layer that all formats can store."""
    is_even = weight.ndim == 2 and len(weight) % 8 == weight.shape[1] % 16 == 0
    return is_even and _LAYER.fullmatch(name) is not None


Writer = Callable[[torch.Tensor, Scheme], Weights]


def write(
    folder: Path,
    settings: Mapping[str, Any],
    writer: Writer,
    scheme: Scheme,
    matches: Callable[[str, torch.Tensor], object],
) -> tuple[Weights, list[Rounded]]:
    """Quantize the checkpoint `folder` in place. Return its weights as ordinary numbers, and the quantized ones."""
    stored, plain, layers = {}, {}, []
    for name, weight in load_file(folder / "model.safetensors").items():
        if not matches(name, weight):
            stored[name], plain[name] = weight, weight
            continue
        layer = name.removesuffix("weight")
        parts = writer(weight, scheme)
        if (bias := stored.get(f"{layer}bias")) is not None:
            parts |= {"bias": bias}
        stored |= {f"{layer}{part}": value.contiguous() for part, value in parts.items()}
        numbers, scales, zeros, group_of = quantized(weight, scheme)
        if "weight_scale" in parts:
            scales = torch.from_numpy(scales).to(parts["weight_scale"].dtype).float().numpy()
        own = torch.from_numpy((numbers - zeros[:, group_of]) * scales[:, group_of]).float()
        plain[name] = own
        kind = {"dynamic": "W8A8_DYNAMIC", "static": "W8A8", None: "W8A16"}[scheme.inputs]
        layers.append(Rounded(own, kind))
    for name, value in plain.items():  # a bias may precede its weight in the file
        if name.endswith("bias"):
            stored[name] = value
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(settings)}))
    return plain, layers
