"""Weights in the formats of GPTQ and AWQ: unsigned numbers of 4 or 8 bits with scales and zero points of groups.

Sources: GPTQModel, nn_modules/qlinear (packing, and the two versions of zero points); AutoAWQ, utils/packing_utils.py
(the order of the numbers in an int32).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor

from mindie_mm.device import QuantizedWeight
from mindie_mm.nn.weights.formats.packed import Format, IntegerWeight, PackedWeight, require
from mindie_mm.nn.weights.formats.packed_integers import unpacked

_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an int32 of each of 8 consecutive numbers. The lowest bits are position 0."""
_PARTS = frozenset({"qweight", "qzeros", "scales"})


class GPTQ(Format):
    """The settings of one checkpoint of GPTQ. The numbers of an int32 are consecutive inputs of one output."""

    adds_biases = True
    """AutoGPTQ writes biases of zeros."""

    def __init__(self, bits: int, zero_shift: int) -> None:
        """Keep the number of bits, and the number that is added to stored zero points."""
        self._bits = bits
        self._zero_shift = zero_shift

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        if (bits := settings.get("bits")) not in _BITS:
            raise ValueError(f"bits={bits!r} must be one of {', '.join(map(str, _BITS))}")
        if (layout := settings.get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format={layout!r} must be gptq or gptq_v2")
        if settings.get("dynamic"):
            raise ValueError("the setting dynamic gives layers different numbers of bits, which is not supported")
        return cls(bits, 1 if layout == "gptq" else 0)

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        return (_PARTS if "qweight" in stored else frozenset()), {"g_idx"}

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        packed = require("qweight", parts["qweight"], torch.int32).T
        inputs = packed.shape[1] * 32 // self._bits
        groups, outputs = parts["scales"].shape
        zeros = require("qzeros", parts["qzeros"], torch.int32, (groups, -(-outputs * self._bits // 32)))
        order = parts.get("g_idx")
        if order is not None and torch.equal(order, torch.arange(inputs, dtype=order.dtype) // -(-inputs // groups)):
            order = None
        numbers = unpacked(packed, self._bits, inputs)
        shifted = unpacked(zeros, self._bits, outputs) + self._zero_shift
        return _weight(numbers, shifted, parts["scales"], None if order is None else order.long())


class AWQ(Format):
    """The settings of one checkpoint of AWQ. The numbers of an int32 are outputs of one input, in `_AWQ_ORDER`."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        if (bits := settings.get("bits")) != 4:
            raise ValueError(f"bits={bits!r} must be 4")
        if (version := str(settings.get("version") or "gemm").lower()) != "gemm":
            raise ValueError(f"version={version!r} must be gemm")
        return cls()

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        return (_PARTS if "qweight" in stored else frozenset()), frozenset()

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        groups, outputs = parts["scales"].shape
        packed = require("qweight", parts["qweight"], torch.int32)
        zeros = require("qzeros", parts["qzeros"], torch.int32, (groups, -(-outputs // 8)))
        numbers, zero_points = (_in_order(unpacked(part, 4, outputs)) for part in (packed, zeros))
        return _weight(numbers.T, zero_points, parts["scales"], None)


def _in_order(numbers: Tensor) -> Tensor:
    """Return numbers [rows, columns] whose groups of 8 columns are in the order of AWQ, in the usual order."""
    ordered: Tensor = numbers.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1)
    return ordered


def _weight(numbers: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None) -> PackedWeight:
    """Return a weight.

    Args:
        numbers: Unsigned, int16 [outputs, inputs].
        zeros: The numbers that represent zero, int16 [groups, outputs].
        scales: [groups, outputs], of any float dtype.
        order: The group of each input, int64 [inputs], or None if groups consist of consecutive inputs.

    """
    if not scales.is_floating_point():
        raise ValueError(f"scales is {scales.dtype}; it must be a float")
    middle = 128  # brings numbers of 8 bits into the range of int8
    return IntegerWeight(
        QuantizedWeight(
            (numbers - middle).to(torch.int8).contiguous(),
            scales.T.float().contiguous(),
            (zeros.T - middle).float().contiguous(),
            order,
        )
    )
