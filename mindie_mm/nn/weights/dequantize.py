"""Dequantization of 8-bit weights during loading, by multiplication with their scales.

A device without 8-bit matrix products, or without the library for them, runs such a checkpoint in the model's dtype.
The weights then take as much memory as in an unquantized checkpoint.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.quantized import method_of, quantization
from mindie_mm.nn.weights.stored_tensors import check_scaled, read_weights, weight_names

_log = logging.getLogger(__name__)

_LIBRARIES: Mapping[str, str] = {"fp8": "kernels", "mxfp8": "kernels", "fbgemm_fp8": "fbgemm_gpu"}
"""Python module that transformers needs for each method to multiply by quantized weights."""
_FORMATS = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors that store one 8-bit float per byte. `formats/` reads the formats of integers."""
_OF_ACTIVATIONS = re.compile(r".+[._](activation_scale|(input|output)_(scale|zero_point)|input_scale_ub|[qkv]_scale)")
"""Names of scales for activations and the KV cache. They are dropped, because both stay unquantized here."""
_EXPONENT_BIAS = 127
"""Bias of the exponents in E8M0."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The layout of the scales of a checkpoint's weights."""

    suffix: str
    """Suffix that turns the name of a weight into the name of its scales."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale. None if each row, or the whole weight, has one scale."""


def scaling(checkpoint: Checkpoint) -> Scaling | None:
    """Return the layout of the scales.

    Return None if the weights are not quantized, or if dequantizing them takes more than multiplying by scales.
    """
    if (settings := quantization(checkpoint)) is None:
        return None
    method = method_of(settings)
    if method in ("fp8", "mxfp8") and (settings.get("expert_dtype") or "fp8") == "fp8":
        block = settings.get("weight_block_size", (1, 32) if method == "mxfp8" else (128, 128))
        return Scaling("_scale_inv", None if block is None else (block[0], block[1]))
    if method == "fbgemm_fp8":
        return Scaling("_scale", None)
    if method == "compressed-tensors":
        return _of_compressed_tensors(settings)
    return None


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Scaling | None:
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    formats = {group.get("format") or settings.get("format") for group in groups}
    weights = [group.get("weights") or {} for group in groups]
    if not groups or not formats.issubset(_FORMATS) or any(_kind(one) != ("float", 8) for one in weights):
        return None
    blocks = {_block(one) for one in weights}
    return Scaling("_scale", blocks.pop()) if len(blocks) == 1 else None


def _kind(weights: Mapping[str, Any]) -> tuple[Any, Any]:
    return weights.get("type"), weights.get("num_bits")


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    if block := weights.get("block_structure"):
        return block[0], block[1]
    return (1, size) if (size := weights.get("group_size") or 0) > 0 else None


def must_dequantize(checkpoint: Checkpoint, device: Device) -> bool:
    """Return whether the weights must and can be dequantized to run on `device`. If so, log a warning."""
    settings = quantization(checkpoint)
    if settings is None or scaling(checkpoint) is None:
        return False
    library = _LIBRARIES.get(method := method_of(settings))
    if library and device.multiplies(torch.float8_e4m3fn) and importlib.util.find_spec(library) is not None:
        return False
    _log.warning(
        "%s is quantized with %r, which the device %s cannot run here; the weights are dequantized and take "
        "as much memory as unquantized weights",
        checkpoint.path,
        method,
        device.name,
    )
    return True


def read_dequantized(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each weight, on the CPU. Scaled weights are dequantized to `dtype`.

    There are two reasons not to use the reader in transformers. That reader leaves other weights in their stored dtype,
    so that adjacent layers may differ in dtype. It also divides a weight evenly among its scales, but the last block of
    a row may be shorter.

    Raises:
        UnsupportedCheckpoint: The scales of a weight are missing or do not fit. The message names the weight.

    """
    scheme = scaling(checkpoint)
    assert scheme is not None, "`must_dequantize` has checked the scaling"
    names = {*weight_names(checkpoint)}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_weights(checkpoint):
        owner, part = _owner(name, scheme.suffix, names)
        parts = {part for part in ("", scheme.suffix) if f"{owner}{part}" in names}
        if (part and "" not in parts) or _OF_ACTIVATIONS.fullmatch(name):
            continue
        if scheme.suffix not in parts:
            check_scaled(checkpoint, name, tensor.dtype)
            yield name, tensor
            continue
        held = waiting.setdefault(owner, {})
        held[part] = tensor
        if held.keys() == parts:
            del waiting[owner]
            try:
                weight = multiplied(held[""], held[scheme.suffix], scheme.block).to(dtype)
            except ValueError as error:
                raise UnsupportedCheckpoint(f"{checkpoint.path}: {owner}: {error}") from error
            yield owner, weight


def _owner(name: str, suffix: str, names: Collection[str]) -> tuple[str, str]:
    """Return the name of the weight that a tensor belongs to, and the suffix of the tensor's own name.

    The joined weights of experts do not end with "weight".
    """
    if name.endswith(suffix) and (name.endswith(f"weight{suffix}") or name.removesuffix(suffix) in names):
        return name.removesuffix(suffix), suffix
    return name, ""


def multiplied(weight: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Return a weight times its scales.

    Args:
        weight: [..., rows, columns], of any dtype.
        scales: A single number, [rows], [rows, 1], or with blocks [..., block rows, block columns]. uint8 scales are
            exponents of two in E8M0.
        block: Rows and columns of a block. Blocks at the end may be shorter.

    Returns:
        The weight, float32 of the same shape.

    Raises:
        ValueError: The scales do not fit the weight.

    """
    values, factors = weight.float(), scales.float()
    if scales.dtype == torch.uint8:
        factors = (factors - _EXPONENT_BIAS).exp2()
    return values * _spread(factors, values.shape, block)


def _spread(numbers: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Repeat the number of each block over all rows and columns of the block, for a weight of `shape`."""
    if numbers.numel() == 1:
        return numbers.reshape(())
    rows, columns = shape[-2:]
    if numbers.ndim == 1:
        numbers = numbers.unsqueeze(-1)
    if block is None:
        block = (1, columns)
    needed = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(numbers.shape[-2:]) != needed:
        raise ValueError(
            f"the weight has {rows} x {columns} numbers in blocks of {block[0]} x {block[1]}, but scales of shape "
            f"{list(numbers.shape)}; the shape must be {list(needed)}"
        )
    spread = numbers.repeat_interleave(block[0], -2)[..., :rows, :]
    return spread.repeat_interleave(block[1], -1)[..., :columns]
