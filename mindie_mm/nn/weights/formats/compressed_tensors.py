"""Integer weights in the formats of compressed-tensors, which llm-compressor writes.

`int-quantized` stores one int8 number per byte, and `pack-quantized` several numbers per int32. Sources:
compressed-tensors, compressors/quantized_compressors and compressors/pack_quantized. `float8.py` reads the formats with
float numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mindie_mm.device import QuantizedWeight, StaticInput
from mindie_mm.nn.weights.formats.packed import Format, IntegerWeight, PackedWeight, block_of, require
from mindie_mm.nn.weights.formats.packed_integers import unpacked

_FORMATS = frozenset({"int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"})
_BITS = (4, 8)
_LINEAR = "Linear"
_PATTERN = "re:"
_IGNORED = re.compile(r".+\.((output_|[qkv]_)(scale|zero_point)|input_global_scale)")
"""Names of scales for outputs and the KV cache, which stay unquantized here."""
_INPUT = frozenset({"input_scale", "input_zero_point"})


@dataclass(frozen=True, slots=True)
class _Group:
    """Settings of the layers with the same quantization."""

    targets: Sequence[str]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None


class CompressedTensors(Format):
    """The groups of layers of one checkpoint."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        """Keep the groups."""
        self._groups = groups

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self | None:
        groups = []
        stated = [one for one in (settings.get("config_groups") or {}).values() if isinstance(one, Mapping)]
        weights = [one.get("weights") or {} for one in stated]
        if any(one.get("type") == "float" for one in weights):
            return None
        for group, own in zip(stated, weights, strict=True):
            stored = group.get("format") or settings.get("format")
            if stored not in _FORMATS or own.get("num_bits") not in _BITS:
                raise ValueError(
                    f"the format {stored!r} with {own.get('num_bits')} bits is not supported; supported are "
                    f"{', '.join(sorted(_FORMATS))} with 4 or 8 bits, and float-quantized"
                )
            groups.append(_Group(group.get("targets") or (), own, group.get("input_activations")))
        if not groups:
            raise ValueError("config_groups has no group of quantized layers")
        if (sparse := (settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
            raise ValueError(f"sparsity_config has the format {sparse!r}, which is not supported")
        return cls(groups)

    def ignores(self, name: str) -> bool:
        return _IGNORED.fullmatch(name) is not None

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        optional = {"weight_zero_point", "weight_g_idx", *_INPUT}
        if "weight_packed" in stored:
            return {"weight_packed", "weight_scale", "weight_shape"}, optional
        if "weight_scale" in stored:
            return {"weight", "weight_scale"}, optional
        return frozenset(), frozenset()

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        group = self._group(name.removesuffix(".weight"))
        zeros = parts.get("weight_zero_point")
        if (packed := parts.get("weight_packed")) is None:
            values = require("weight", parts["weight"], torch.int8)
        else:
            bits = group.weights["num_bits"]
            rows, columns = require("weight_shape", parts["weight_shape"].long(), torch.int64, (2,)).tolist()
            values = _signed(require("weight_packed", packed, torch.int32), bits, columns)
            if len(values) != rows:
                raise ValueError(f"weight_packed has {len(values)} rows; weight_shape states {rows}")
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _signed(zeros.T, bits, rows).T
        block, _ = block_of(group.weights.get("block_structure") or (1, 1))
        scales = _of_groups("weight_scale", parts["weight_scale"], len(values), block)
        zeros = None if zeros is None else _of_groups("weight_zero_point", zeros, len(values), block)
        zeros = zeros if zeros is not None and zeros.any() else None
        order = parts.get("weight_g_idx")
        order = None if order is None or int(order.min()) < 0 else order.long()
        rounds = zeros is None and order is None and scales.shape[1] == 1 and _rounds(group.inputs)
        static = _static(parts, values, scales) if rounds and not (group.inputs or {}).get("dynamic") else None
        return IntegerWeight(QuantizedWeight(values.contiguous(), scales, zeros, order, rounds, static))

    def _group(self, layer: str) -> _Group:
        """Return the group of a layer. A target is a class, a name, or a pattern for names."""
        for group in self._groups:
            for target in group.targets:
                pattern = target.removeprefix(_PATTERN)
                is_pattern = target != pattern
                if re.match(pattern, layer) if is_pattern else layer == target or layer.endswith(f".{target}"):
                    return group
        if found := next((group for group in self._groups if _LINEAR in group.targets), None):
            return found
        raise ValueError(f"no group in config_groups has the target {layer} or {_LINEAR}")


def _rounds(inputs: Mapping[str, Any] | None) -> bool:
    """Return whether inputs are rounded to 8 bits, by constants or by the largest value of each row."""
    if not inputs or inputs.get("num_bits") != 8 or inputs.get("type") == "float":
        return False
    return inputs.get("strategy") == ("token" if inputs.get("dynamic") else "tensor") and (
        not inputs.get("dynamic") or inputs.get("symmetric", True)
    )


def _static(parts: Mapping[str, Tensor], values: Tensor, scales: Tensor) -> StaticInput:
    if (scale := parts.get("input_scale")) is None:
        raise ValueError("input_scale is missing, but inputs have constant scales")
    zero = parts.get("input_zero_point", torch.zeros(1))
    if scale.numel() != 1 or zero.numel() != 1 or not scale.item() > 0:
        raise ValueError(
            f"input_scale has shape {list(scale.shape)} and input_zero_point {list(zero.shape)}; both must have one "
            "value, and the scale must be positive"
        )
    offset = float(zero.item())
    shift = (-offset * values.sum(1)).int()
    return StaticInput(scale.float().item(), offset, scales[:, 0] * scale.float(), shift, has_bias=False)


def _signed(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the unsigned numbers in the columns of `packed`, int32, and return them as signed int8 [rows, count]."""
    numbers: Tensor = (unpacked(packed, bits, count) - 2 ** (bits - 1)).to(torch.int8)
    return numbers


def _of_groups(name: str, tensor: Tensor, rows: int, block: int) -> Tensor:
    """Return scales or zero points as float32 [rows, groups].

    A single number applies to all rows, and other numbers apply to `block` rows.
    """
    numbers = tensor.float()
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).repeat(rows, 1)
    numbers = numbers.repeat_interleave(block, 0)[:rows]
    if len(numbers) != rows:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {rows} rows")
    return numbers.reshape(rows, -1).contiguous()
