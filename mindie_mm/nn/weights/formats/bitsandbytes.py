"""Weights that bitsandbytes packed into 4 or 8 bits, for models whose layers mindie_mm implements.

Sources: QLoRA (Dettmers et al., 2023, arXiv 2305.14314) and LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339). A
checkpoint has several tensors for each packed weight: the packed numbers, and companion tensors with their scales.
4-bit weights run in bitsandbytes' own layers, and 8-bit weights in `Linear8bit`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mindie_mm.device import Device
from mindie_mm.device.choices import choose
from mindie_mm.nn.weights.formats.packed import Format, PackedWeight

_COMPANION = re.compile(
    r"(?P<weight>.+)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
    r"|(?P<layer>.+)\.(?P<part_of_8>SCB|weight_format)"
)
_NUMBERS = "weight"
"""The part of a packed weight that has its own name."""
_ROW_MAJOR = 0
"""Value of `weight_format` for a row-major matrix, as in PyTorch."""
_LARGEST = 127
"""The int8 value that represents the scale of a row."""
_CPU_BLOCK = 32
"""Number of outputs that bitsandbytes' AVX512-BF16 kernel computes at once.

The number of outputs of a layer must be a multiple of this number.
"""


class _Weight4bit(PackedWeight):
    def __init__(self, parts: Mapping[str, Tensor], compute_dtype: torch.dtype) -> None:
        from bitsandbytes.functional import QuantState

        self._data = parts[_NUMBERS]
        self._companions = {part: tensor for part, tensor in parts.items() if part != _NUMBERS}
        self._state = QuantState.from_dict(dict(self._companions), torch.device("cpu"))
        self.shape = tuple(self._state.shape)
        self._check_sizes()
        self._compute_dtype = compute_dtype

    def _check_sizes(self) -> None:
        """Raise ValueError if a tensor is too short for the shape, because bitsandbytes would read out of bounds."""
        state, size = self._state, math.prod(self.shape)
        needed = {"numbers": (self._data.numel() * self._data.itemsize, -(-size // 2))}
        needed["absmax"] = (state.absmax.numel(), num_blocks := -(-size // state.blocksize))
        if state.nested:
            needed["nested_absmax"] = (state.state2.absmax.numel(), -(-num_blocks // state.state2.blocksize))
        for part, (actual, expected) in needed.items():
            if actual < expected:
                raise ValueError(
                    f"the weight has {actual} {part}; a weight of shape {list(self.shape)} needs {expected}"
                )

    def dequantized(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self._data, self._state)
        return weight

    def layer(self, plain: nn.Linear, device: Device) -> nn.Module:
        from bitsandbytes.nn import Linear4bit, Params4bit

        layer: Any = Linear4bit(
            plain.in_features,
            plain.out_features,
            plain.bias is not None,
            compute_dtype=self._compute_dtype,
            quant_storage=self._data.dtype,
            device=torch.device("meta"),
        )
        layer.weight = Params4bit.from_prequantized(
            self._data, dict(self._companions), device=device.torch_device, module=layer
        )
        layer.bias = plain.bias
        if self._compute_dtype != torch.bfloat16:  # the CPU kernel ignores the compute dtype
            layer.support_avx512bf16_for_cpu = False
        avoid_cpu_kernel(layer)
        module: nn.Module = layer
        return module


def avoid_cpu_kernel(module: nn.Module) -> None:
    """Disable bitsandbytes' AVX512-BF16 kernel in 4-bit layers of `module` whose shape the kernel does not support."""
    layer: Any
    for layer in module.modules():
        if (state := getattr(getattr(layer, "weight", None), "quant_state", None)) is not None:
            rows, columns = state.shape
            is_supported = rows % _CPU_BLOCK == columns % state.blocksize == 0 and layer.weight.dtype == torch.uint8
            if not is_supported or not choose("4bit", lambda: True):
                layer.support_avx512bf16_for_cpu = False


class _Weight8bit(PackedWeight):
    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self._data, self._scales = parts[_NUMBERS], parts["SCB"]
        if (layout := int(parts.get("weight_format", torch.tensor(_ROW_MAJOR)))) != _ROW_MAJOR:
            raise ValueError(f"weight_format is {layout}; only row-major weights ({_ROW_MAJOR}) are supported")
        self.shape = tuple(self._data.shape)
        if self._data.dtype != torch.int8 or self._scales.shape != self.shape[:1]:
            raise ValueError(
                f"the weight has dtype {self._data.dtype} and {len(self._scales)} scales for {self.shape[0]} rows; "
                "it must have dtype torch.int8 and one scale per row"
            )

    def dequantized(self) -> Tensor:
        return _multiplied(self._data, self._scales)

    def layer(self, plain: nn.Linear, device: Device) -> nn.Module:
        target = device.torch_device
        return Linear8bit(self._data.to(target), self._scales.to(target), plain.bias)


class Linear8bit(nn.Module):
    """A linear layer with int8 weights and one scale per row.

    bitsandbytes' own layer also rounds activations to 8 bits, except in columns where some row of the batch has a large
    value. The answer to a request would then depend on the other requests in the batch.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        """Wrap `weight`, int8 [outputs, inputs], and `scales`, float32 [outputs], without copying them."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] of any float dtype to [..., outputs]."""
        if rows.dtype == torch.float16:  # products with unscaled integers may overflow float16
            return linear(rows, _multiplied(self.weight, self.scales).to(rows.dtype), self.bias)
        out = linear(rows, self.weight.to(rows.dtype)) * (self.scales / _LARGEST).to(rows.dtype)
        return out if self.bias is None else out + self.bias


def _multiplied(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the dequantized weight, float32 [outputs, inputs]."""
    return weight * (scales.float() / _LARGEST).unsqueeze(1)


class BitsAndBytes(Format):
    """Weights of 4 or 8 bits.

    The names of companion tensors determine which weights are packed. `llm_int8_skip_modules` is ignored, because
    releases of transformers differ in how they match names with that list.
    """

    def __init__(self, compute_dtype: torch.dtype) -> None:
        """Keep the dtype in which layers with weights of 4 bits multiply."""
        self._compute_dtype = compute_dtype

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        return cls(getattr(torch, settings.get("bnb_4bit_compute_dtype") or "float32"))

    def split(self, name: str) -> tuple[str, str]:
        if (match := _COMPANION.fullmatch(name)) is None:
            return name, _NUMBERS
        if match["layer"]:
            return f"{match['layer']}.weight", match["part_of_8"]
        return match["weight"], match["part"]

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        return (stored | {_NUMBERS} if stored - {_NUMBERS} else frozenset()), frozenset()

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        return _Weight8bit(parts) if "SCB" in parts else _Weight4bit(parts, self._compute_dtype)
