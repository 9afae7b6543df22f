"""Weights that bitsandbytes packed into 4 or 8 bits.

Sources: QLoRA (Dettmers et al., 2023, arXiv 2305.14314) and LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339);
bitsandbytes, functional.py (`QuantState`, `dequantize_4bit`). A checkpoint has several tensors for each packed weight:
the packed numbers, and companion tensors with their scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor

from mindie_mm.device import QuantizedWeight
from mindie_mm.nn.weights.formats.packed import Format, IntegerWeight, PackedWeight, require

_COMPANION = re.compile(
    r"(?P<weight>.+)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
    r"|(?P<layer>.+)\.(?P<part_of_8>SCB|weight_format)"
)
_STATE = "quant_state."
_NUMBERS = "weight"
"""The part of a packed weight that has its own name."""
_ROW_MAJOR = 0
"""Value of `weight_format` for a row-major matrix, as in PyTorch."""
_LARGEST = 127
"""The int8 value that represents the scale of a row."""


class BitsAndBytes(Format):
    """Weights of 4 or 8 bits.

    The names of companion tensors determine which weights are packed. `llm_int8_skip_modules` is ignored, because
    releases of transformers differ in how they match names with that list. LLM.int8() also rounds inputs to 8 bits,
    except in columns where some row of the batch has a large value. The answer to a request would then depend on the
    other requests in the batch, so inputs are not rounded.
    """

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        if settings.get("llm_int8_has_fp16_weight"):
            raise ValueError("llm_int8_has_fp16_weight is set, which is for training only; set this key to false")
        return cls()

    def split(self, name: str) -> tuple[str, str]:
        if (match := _COMPANION.fullmatch(name)) is None:
            return name, _NUMBERS
        if match["layer"]:
            return f"{match['layer']}.weight", match["part_of_8"]
        return match["weight"], match["part"]

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        return (stored | {_NUMBERS} if stored - {_NUMBERS} else frozenset()), frozenset()

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        return IntegerWeight(_of_8_bits(parts)) if "SCB" in parts else _of_4_bits(parts)


def _of_8_bits(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    if (layout := int(parts.get("weight_format", torch.tensor(_ROW_MAJOR)))) != _ROW_MAJOR:
        raise ValueError(f"weight_format is {layout}; only row-major weights ({_ROW_MAJOR}) are supported")
    weight = require("weight", parts[_NUMBERS], torch.int8)
    scales = require("SCB", parts["SCB"].float(), torch.float32, (len(weight),))
    return QuantizedWeight(weight, (scales / _LARGEST).unsqueeze(1))


def _of_4_bits(parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
    """Return a weight, or its dequantized numbers if a block of numbers with the same scale extends over two rows."""
    name = next((name for name in parts if name.startswith(_STATE)), f"{_STATE}bitsandbytes__nf4")
    state = json.loads(bytes(parts[name].tolist()))
    (rows, columns), size = state["shape"], state["blocksize"]
    absmax = _absmax(parts, state, -(-rows * columns // size))
    codes = require("quant_map", parts["quant_map"], torch.float32, (16,))
    packed = _at_least("numbers", parts[_NUMBERS].contiguous().view(torch.uint8).flatten(), -(-rows * columns // 2))
    if columns % size == 0:
        values = (packed << 4 | packed >> 4).view(rows, columns // 2)  # the first number is in the high bits
        return IntegerWeight(QuantizedWeight(values, absmax.view(rows, -1), codes=codes))
    numbers = codes[torch.stack([packed >> 4, packed & 15], 1).flatten().int()]
    weight: Tensor = numbers[: rows * columns] * absmax.repeat_interleave(size)[: rows * columns]
    return weight.view(rows, columns)


def _absmax(parts: Mapping[str, Tensor], state: Mapping[str, Any], count: int) -> Tensor:
    """Return the scale of each block of numbers, float32 [count]. Double quantization rounds the scales to 8 bits."""
    absmax = _at_least("absmax", parts["absmax"], count)
    if "nested_absmax" not in parts:
        return absmax.float()
    size = state["nested_blocksize"]
    nested = _at_least("nested_absmax", parts["nested_absmax"], -(-count // size))
    rounded = parts["nested_quant_map"][require("absmax", absmax, torch.uint8).int()]
    scales: Tensor = rounded * nested.repeat_interleave(size)[:count] + state["nested_offset"]
    return scales


def _at_least(name: str, tensor: Tensor, count: int) -> Tensor:
    """Return the first numbers of a tensor. Raise ValueError if it is too short."""
    if len(tensor) < count:
        raise ValueError(f"the weight has {len(tensor)} {name}; its shape needs {count}")
    return tensor[:count]
