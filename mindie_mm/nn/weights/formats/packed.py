"""The interfaces of packed weights and of their formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor, nn

from mindie_mm.device import Device, QuantizedWeight

Block = tuple[int, int]
"""Rows and columns that share a scale."""


class PackedWeight(ABC):
    """The weight of a linear layer [outputs, inputs] with fewer than 16 bits per number, or of several experts."""

    shape: tuple[int, ...]
    """Shape of the unpacked weight. The joined weights of experts have three axes."""
    has_bias: bool = False
    """True if the packed weight also contains the bias of the layer."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Return the weight in a float dtype, on the CPU."""

    def dequantized_bias(self) -> Tensor | None:
        """Return the bias of the layer that the packed weight contains, or None."""
        return None

    def stays_packed(self, device: Device) -> bool:
        """Return whether a layer on `device` can have this weight. If not, the weight is dequantized."""
        return True

    @abstractmethod
    def layer(self, bias: nn.Parameter | None, device: Device) -> nn.Module:
        """Return a linear layer on `device`. `bias` is the bias of the layer that it replaces."""

    def of_experts(self, transposed: bool) -> Sequence[PackedWeight]:
        """Return the weights of the single experts. Return nothing for a weight with two axes.

        Args:
            transposed: True if the joined weights are [experts, inputs, outputs].

        """
        return ()


class IntegerWeight(PackedWeight):
    """A weight of integers with scales, as `QuantizedWeight` describes it."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.quantized = weight
        self.shape = weight.shape
        self.has_bias = weight.has_bias

    def dequantized(self) -> Tensor:
        return self.quantized.dequantized()

    def dequantized_bias(self) -> Tensor | None:
        return self.quantized.dequantized_bias()

    def layer(self, bias: nn.Parameter | None, device: Device) -> nn.Module:
        return device.quantized_linear(self.quantized, None if self.has_bias else bias)


class Format(ABC):
    """The layout of the quantized weights of one checkpoint."""

    adds_biases: bool = False
    """True if linear and normalization layers may have biases that the unquantized model lacks."""

    @classmethod
    @abstractmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        """Return the format that the settings of a checkpoint describe, or None if they describe another format.

        Raises:
            ValueError: The format is not supported.

        """

    def split(self, name: str) -> tuple[str, str]:
        """Return the name of the weight to which a tensor would belong, and the name of this part of the weight."""
        layer, _, part = name.rpartition(".")
        return f"{layer}.weight", part

    @abstractmethod
    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        """Return the parts that a packed weight must have, and those that it may have. A plain weight has no parts.

        Args:
            weight: Name of the weight.
            stored: Its parts in the weight files.

        """

    def stated_weights(self) -> AbstractSet[str]:
        """Return the packed weights that the settings name, which must be in the weight files."""
        return frozenset()

    def ignores(self, name: str) -> bool:
        """Return whether a tensor is dropped, because the values that it describes stay unquantized here."""
        return False

    @abstractmethod
    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        """Return the packed weight, or an equal plain tensor. Raise ValueError if a part is invalid.

        Args:
            name: Name of the weight.
            parts: Its tensors, by their names in `parts`.

        """


def block_of(stated: Any) -> Block:
    """Return the size of blocks that settings state. Raise ValueError unless it is two positive integers.

    Older releases of compressed-tensors write 128x128.
    """
    sizes = stated.split("x") if isinstance(stated, str) else stated
    try:
        rows, columns = map(int, sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ValueError(f"blocks have the size {stated!r}; it must be two positive integers, rows and columns")
    return rows, columns


def require(name: str, tensor: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
    """Return `tensor`. Raise ValueError unless it has this dtype and, if shapes are given, one of them."""
    if tensor.dtype != dtype or (shapes and tuple(tensor.shape) not in shapes):
        expected = " or ".join(str(list(shape)) for shape in shapes) or "any shape"
        raise ValueError(
            f"{name} is {_dtype_name(tensor.dtype)} {list(tensor.shape)}; it must be {_dtype_name(dtype)} {expected}"
        )
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
