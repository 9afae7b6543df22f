"""Weights in floats of 8 bits (FP8), whose rows, blocks or groups have scales.

Sources: transformers, quantizers fp8, mxfp8 and fbgemm_fp8; compressed-tensors, `float-quantized`. A device may keep
weights in FP8 (`Device.keeps_float8`). On other devices they are dequantized when they are loaded, because their
products are computed in the model's dtype.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor, nn

from mindie_mm.device import FLOAT8, Device, QuantizedWeight
from mindie_mm.nn.weights.formats.packed import Block, Format, PackedWeight, block_of
from mindie_mm.nn.weights.quantized import method_of

_LIBRARIES: Mapping[str, str] = {"fp8": "kernels", "mxfp8": "kernels", "fbgemm_fp8": "fbgemm_gpu"}
"""Python module that transformers needs for each method to multiply by quantized weights."""
_FORMATS = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors that store one float per byte."""
_OF_ACTIVATIONS = re.compile(r".+[._](activation_scale|(input|output)_(scale|zero_point)|input_scale_ub|[qkv]_scale)")
"""Names of scales for activations and the KV cache. They are dropped, because both stay unquantized here."""
_EXPONENT_BIAS = 127
"""Bias of the exponents in E8M0."""
_NUMBERS = "weight"
"""Part with the numbers of a weight."""
_NAN = 0x7F
"""The bits of NaN without the sign."""
_LEAST_GROUP, _LARGEST_SCALE = 32, 128.0
"""Weights with smaller groups or larger scales are dequantized: scales would take much memory, or overflow in compiled
code."""


class Float8(Format):
    """The layout of the scales of one checkpoint."""

    def __init__(self, suffix: str, block: Block | None) -> None:
        """Keep the layout.

        Args:
            suffix: Suffix that turns the name of a weight into the name of its scales.
            block: Rows and columns that share a scale. None if each row, or the whole weight, has one scale.

        """
        self._suffix, self._block = suffix, block

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        method = method_of(settings)
        if method == "fbgemm_fp8":
            return cls("_scale", None)
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(settings)
        if (settings.get("expert_dtype") or "fp8") != "fp8":
            return None
        block = settings.get("weight_block_size", (1, 32) if method == "mxfp8" else (128, 128))
        return cls("_scale_inv", None if block is None else block_of(block))

    @classmethod
    def _of_compressed_tensors(cls, settings: Mapping[str, Any]) -> Self | None:
        groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
        formats = {group.get("format") or settings.get("format") for group in groups}
        weights = [group.get("weights") or {} for group in groups]
        kinds = {(one.get("type"), one.get("num_bits")) for one in weights}
        if not formats.issubset(_FORMATS) or kinds != {("float", 8)}:
            return None
        blocks = {_block(one) for one in weights}
        return cls("_scale", blocks.pop()) if len(blocks) == 1 else None

    def split(self, name: str) -> tuple[str, str]:
        if name.endswith(self._suffix):
            return name.removesuffix(self._suffix), self._scales
        return name, _NUMBERS

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        # The joined weights of experts do not end with "weight". Other names that end with the suffix are no scales.
        is_scaled = self._scales in stored and (_NUMBERS in stored or weight.endswith("weight"))
        return ({_NUMBERS, self._scales} if is_scaled else frozenset()), frozenset()

    def ignores(self, name: str) -> bool:
        return _OF_ACTIVATIONS.fullmatch(name) is not None

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        return Float8Weight(parts[_NUMBERS], parts[self._scales], self._block)

    @property
    def _scales(self) -> str:
        return f"{_NUMBERS}{self._suffix}"


class Float8Weight(PackedWeight):
    """A weight, or the joined weights of experts, of 8-bit floats."""

    def __init__(self, numbers: Tensor, scales: Tensor, block: Block | None) -> None:
        """Keep the tensors.

        Args:
            numbers: [..., rows, columns], of any dtype.
            scales: A single number, [rows], [rows, 1], or with blocks [..., block rows, block columns]. uint8 scales
                are exponents of two in E8M0.
            block: Rows and columns of a block. Blocks at the end may be shorter.

        Raises:
            ValueError: The scales do not fit the weight.

        """
        self.shape = tuple(numbers.shape)
        factors = scales.float()
        if scales.dtype == torch.uint8:
            factors = (factors - _EXPONENT_BIAS).exp2()
        self._numbers, self._factors, self._block = numbers, factors, block
        self._scales, self._group = _of_groups(factors, numbers.shape, block)

    def dequantized(self) -> Tensor:
        groups: Tensor = self._numbers.float().unflatten(-1, (-1, self._group))
        return (groups * self._scales.unsqueeze(-1)).flatten(-2)

    def stays_packed(self, device: Device) -> bool:
        """Return whether the device multiplies by these numbers exactly as by the dequantized weight."""
        return (
            device.keeps_float8
            and self._numbers.dtype == FLOAT8
            and self._group >= _LEAST_GROUP
            and bool(self._scales.abs().max() <= _LARGEST_SCALE)
            and not bool((self._numbers.view(torch.uint8) & _NAN == _NAN).any())
        )

    def layer(self, bias: nn.Parameter | None, device: Device) -> nn.Module:
        weight = QuantizedWeight(self._numbers.contiguous(), self._scales.contiguous())
        return device.quantized_linear(weight, bias)

    def of_experts(self, transposed: bool) -> Sequence[PackedWeight]:
        if self._numbers.ndim != 3:
            return ()
        numbers, factors, block = self._numbers, self._factors, self._block or (1, self.shape[-1])
        factors = factors.expand(len(numbers), 1, 1) if factors.numel() == 1 else factors
        if transposed:
            numbers, factors, block = numbers.mT, factors.mT, block[::-1]
        return [Float8Weight(*own, block) for own in zip(numbers, factors, strict=True)]


def runs_in_transformers(settings: Mapping[str, Any], device: Device) -> bool:
    """Return whether transformers' layers multiply in FP8 on this device, with the library that they need."""
    library = _LIBRARIES.get(method_of(settings))
    return (
        library is not None
        and (settings.get("expert_dtype") or "fp8") == "fp8"
        and device.multiplies(FLOAT8)
        and importlib.util.find_spec(library) is not None
    )


def _block(weights: Mapping[str, Any]) -> Block | None:
    if block := weights.get("block_structure"):
        return block_of(block)
    return (1, size) if (size := weights.get("group_size") or 0) > 0 else None


def _of_groups(numbers: Tensor, shape: torch.Size, block: Block | None) -> tuple[Tensor, int]:
    """Return the scales [..., rows, groups] of a weight of `shape`, and the number of columns in a group.

    A group is a block, or if the last of several blocks is shorter, the largest part that divides both.
    """
    rows, columns = shape[-2:]
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(rows, 1), columns
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
    width = min(block[1], columns)
    group = math.gcd(columns, width)
    return spread.repeat_interleave(width // group, -1)[..., : columns // group], group
