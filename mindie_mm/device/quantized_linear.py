"""Linear layers with quantized weights, as checkpoints publish them.

`QuantizedWeight` describes a weight of any format. `QuantizedLinear` computes with it in plain PyTorch on every device.
A device may replace the layer by its own (`Device.quantized_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

_LARGEST = 127
"""The int8 value that represents the largest absolute value of a row."""
_MOST = 15
"""The largest value of 4 bits."""
_ROUNDING = 0.5
"""Largest rounding error of an integer."""
_TENSORS = ("values", "scales", "zeros", "group_of", "codes")
FLOAT8 = torch.float8_e4m3fn
"""The dtype of weights in FP8. They are finite, and their scales at most 128."""
FLOAT8_UNIT = 2.0**120
"""An FP8 number divided by the float32 that has its bits for sign, exponent and fraction in the same places."""
_FLOAT8_SHIFT, _FLOAT8_MASK = 2**20, -0x78100000
_EXACT_WIDTH = 1024
"""Number of products of two int8 values whose sum is exact in float32, because it is at most 2 ** 24."""


@dataclass(frozen=True, slots=True)
class StaticInput:
    """How a layer rounds its input to 8 bits, with constants from calibration."""

    scale: float
    """Difference between consecutive rounded values."""
    offset: float
    """The rounded value that represents zero."""
    product_scales: Tensor
    """Factors from integer sums to outputs, float32 [outputs]."""
    bias: Tensor
    """Number to add to each integer sum, int32 [outputs]. It corrects for `offset`."""
    has_bias: bool
    """True if `bias` also contains the bias of the layer, which then has none of its own."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The quantized weight of a linear layer: `(values - zeros) * scales`, or `codes[values] * scales`."""

    values: Tensor
    """int8 or `FLOAT8` [outputs, inputs], or uint8 [outputs, inputs / 2]. A byte of uint8 has two values from 0 to 15,
    the first in the low bits."""
    scales: Tensor
    """float32 [outputs, groups]. Each group of consecutive inputs has a scale."""
    zeros: Tensor | None = None
    """The values that represent zero, float32 in the shape of `scales`. None means 0."""
    group_of: Tensor | None = None
    """The group of each input, int64 [inputs], if groups do not consist of consecutive inputs."""
    rounds_input: bool = False
    """True if the input is rounded to 8 bits, for products of integers."""
    static_input: StaticInput | None = None
    """How to round the input. None means that each row is divided by its largest absolute value."""
    codes: Tensor | None = None
    """The numbers that the values 0 to 15 stand for, float32 [16]. None means the values themselves."""

    def __post_init__(self) -> None:
        """Raise ValueError if the tensors do not fit together."""
        rows, columns = self.shape
        groups = self.scales.shape[-1]
        if self.scales.shape != (rows, groups) or (self.group_of is None and columns % groups):
            raise ValueError(
                f"the weight has {rows} x {columns} values, but scales of shape {list(self.scales.shape)}; the "
                f"scales must have {rows} rows, and {columns} must be a multiple of their number of columns"
            )
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"the zero points have shape {list(self.zeros.shape)}; they must have that of the scales, "
                f"{list(self.scales.shape)}"
            )
        if self.group_of is not None and (
            self.group_of.shape != (columns,) or not 0 <= int(self.group_of.min()) <= int(self.group_of.max()) < groups
        ):
            raise ValueError(f"the weight has {columns} inputs in {groups} groups, but another table of groups")
        assert not self.rounds_input or (groups == 1 and self.zeros is None and self.values.dtype == torch.int8)

    @property
    def shape(self) -> tuple[int, ...]:
        """[outputs, inputs]."""
        return _shape(self.values)

    @property
    def has_bias(self) -> bool:
        """True if the weight also describes the bias of the layer."""
        return self.static_input is not None and self.static_input.has_bias

    def dequantized(self) -> Tensor:
        """Return the weight, float32 [outputs, inputs]."""
        return _dequantized(self.values, self.scales, self.zeros, self.group_of, self.codes)

    def dequantized_bias(self) -> Tensor | None:
        """Return the bias of the layer that the weight describes, float32 [outputs], or None.

        The bias is 0 where only the rounding of `StaticInput.bias` differs from 0.
        """
        if self.static_input is None or not self.static_input.has_bias:
            return None
        own = self.static_input
        sums = own.bias + own.offset * self.values.sum(1)
        return sums.where(sums.abs() > _ROUNDING, 0) * own.product_scales

    def packed(self) -> QuantizedWeight:
        """Return the same weight with two values per byte if it has at most 16 different values."""
        if self.values.dtype != torch.int8:
            return self
        least = self.values.min()
        if self.rounds_input or self.codes is not None or self.shape[1] % 2 or self.values.max() - least.int() > _MOST:
            return self
        values = (self.values - least).to(torch.uint8)
        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        return replace(self, values=values[:, ::2] | values[:, 1::2] << 4, zeros=zeros - least)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on `device`."""
        own = self.static_input
        if own is not None:
            own = replace(own, product_scales=own.product_scales.to(device), bias=own.bias.to(device))
        moved: dict[str, Any] = {name: getattr(self, name) for name in _TENSORS}
        moved = {name: None if one is None else one.to(device) for name, one in moved.items()}
        return replace(self, static_input=own, **moved)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, for inference only."""

    block: ClassVar[int] = 2**26
    """Maximum number of values of the weight that are dequantized at a time. It limits the memory."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Create the layer with tensors that are on its device."""
        super().__init__()
        self.shape = self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.multiply: Callable[[Tensor, Tensor], Tensor] = linear
        """Function that multiplies rows by a weight of the same dtype."""
        self.rounds_input = weight.rounds_input
        for name in _TENSORS:
            self.register_buffer(name, getattr(weight, name), persistent=False)
        own = weight.static_input
        self.input_scale = None if own is None else own.scale
        self.input_offset = 0.0 if own is None else own.offset
        self.register_buffer("product_scales", None if own is None else own.product_scales, persistent=False)
        self.register_buffer("sum_bias", None if own is None else own.bias, persistent=False)

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None
    codes: Tensor | None
    product_scales: Tensor | None
    sum_bias: Tensor | None

    @classmethod
    def joined(cls, layers: Sequence[QuantizedLinear]) -> Self:
        """Return one layer whose output is the concatenated output of `layers`, which have the same input.

        Raises:
            ValueError: The layers round their input differently, or have different groups of inputs.

        """
        first = layers[0]
        if any(layer.treatment() != first.treatment() for layer in layers) or first.group_of is not None:
            raise ValueError("the layers differ in the rounding or the groups of their inputs")

        def together(name: str) -> Tensor:
            return torch.cat([getattr(layer, name) for layer in layers])

        static = None
        if first.input_scale is not None:
            static = StaticInput(
                first.input_scale, first.input_offset, together("product_scales"), together("sum_bias"), has_bias=False
            )
        zeros = None if first.zeros is None else together("zeros")
        weight = QuantizedWeight(
            together("values"), together("scales"), zeros, None, first.rounds_input, static, first.codes
        )
        biases = [layer.scales.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        return cls(weight, torch.cat(biases) if any(layer.bias is not None for layer in layers) else None)

    def treatment(self) -> tuple[object, ...]:
        """Return the properties in which joined layers must agree."""
        return (
            self.rounds_input,
            self.input_scale,
            self.input_offset,
            self.scales.shape[1],
            self.zeros is None,
            self.group_of is None,
            self.values.dtype,
            None if self.codes is None else tuple(self.codes.tolist()),
        )

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, float32 [outputs, inputs], for code that reads the weight of a linear layer."""
        return _dequantized(self.values, self.scales, self.zeros, self.group_of, self.codes)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] of any float dtype to [..., outputs]."""
        flat = rows.reshape(-1, self.in_features)
        out = self.product(flat).to(rows.dtype) if self.rounds_input else self.plain_product(flat)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*rows.shape[:-1], self.out_features)

    def plain_product(self, rows: Tensor) -> Tensor:
        """Multiply rows by the weight, without rounding the rows and without the layer's bias."""
        size = max(self.block // self.in_features, 1)
        parts = []
        for start in range(0, self.out_features, size):
            block = slice(start, start + size)
            zeros = None if self.zeros is None else self.zeros[block]
            weight = _dequantized(self.values[block], self.scales[block], zeros, self.group_of, self.codes)
            parts.append(self.multiply(rows, weight.to(rows.dtype)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def product(self, rows: Tensor) -> Tensor:
        """Return the product of rounded rows with the weight, float32 [rows, outputs], without the layer's bias.

        The result for a row does not depend on the other rows.
        """
        values = rows.float()
        if self.input_scale is None:
            scales = values.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / _LARGEST
            rounded = (values / scales).round_().to(torch.int8)
            return self.integer_product(rounded) * scales * self.scales.T
        rounded = (values / self.input_scale + self.input_offset).round_().clamp_(-128, 127).to(torch.int8)
        assert self.sum_bias is not None
        assert self.product_scales is not None
        return (self.integer_product(rounded) + self.sum_bias) * self.product_scales

    def integer_product(self, rows: Tensor) -> Tensor:
        """Return the exact product of int8 [rows, inputs] with the values of the weight, int32 [rows, outputs]."""
        total = rows.new_zeros(len(rows), self.out_features, dtype=torch.int32)
        for part, values in zip(rows.split(_EXACT_WIDTH, 1), self.values.split(_EXACT_WIDTH, 1), strict=True):
            total += (part.float() @ values.float().T).int()
        return total


def _shape(values: Tensor) -> tuple[int, int]:
    rows, columns = values.shape
    return rows, columns * 2 if values.dtype == torch.uint8 else columns


def _dequantized(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None, codes: Tensor | None
) -> Tensor:
    """Return a weight, float32 [outputs, inputs], from the tensors of a `QuantizedWeight`."""
    if codes is not None:  # a row of the table has the numbers of a byte
        pairs = torch.stack([codes.repeat(len(codes)), codes.repeat_interleave(len(codes))], 1)
        values = embedding(values.int(), pairs).flatten(1)
    elif values.dtype == torch.uint8:
        values = torch.stack([values & _MOST, values >> 4], 2).flatten(1)
    if group_of is not None:
        if zeros is not None:
            values = values - zeros[:, group_of]
        return values * scales[:, group_of]
    if values.dtype == FLOAT8:  # torch converts it 11 times as slowly
        bits = values.view(torch.int8).int().mul_(_FLOAT8_SHIFT).bitwise_and_(_FLOAT8_MASK)
        values, scales = bits.view(torch.float32), scales * FLOAT8_UNIT
    values = values.unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        values = values - zeros.unsqueeze(2)
    return (values * scales.unsqueeze(2)).flatten(1)
