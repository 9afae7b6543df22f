"""Weights that ModelSlim quantized for Ascend NPUs (format AscendV1, also the older files of its calibrators).

quant_model_description.json states the type of each tensor. Formulas: msmodelslim, save/ascendv1.py and
save/utils/pack.py; docs/npu.md lists the operators that compute with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Self

import torch
from torch import Tensor

from mindie_mm.device import QuantizedWeight, StaticInput
from mindie_mm.nn.weights.formats.packed import Format, IntegerWeight, PackedWeight, require

_FLOAT = "FLOAT"
_STATIC = frozenset({"weight", "input_scale", "input_offset", "deq_scale", "quant_bias"})
_DYNAMIC = frozenset({"weight", "weight_scale", "weight_offset"})
_TYPES: Mapping[str, AbstractSet[str]] = {
    "W8A8": _STATIC,
    "W8A8_DYNAMIC": _DYNAMIC,
    "W8A8_MIX": _DYNAMIC,
    "W8A16": _DYNAMIC,
    "W4A8_DYNAMIC": _DYNAMIC,
}
"""Names of the tensors that a layer of each type must have. Of W8A8_MIX, the dynamic half is used, as in MindIE."""
_UNUSED = frozenset({"weight_scale", "weight_offset", "scale_bias", "input_scale", "input_offset", "deq_scale"})
_UNUSED_OF_MIX = "quant_bias"
_REASONS = {
    "W8A8S": "sparse weights of Atlas 300I (310P)",
    "W8A8SC": "sparse, compressed weights of Atlas 300I (310P)",
    "W16A16S": "sparse weights of Atlas 300I (310P)",
}
_OF_CACHE = re.compile(r".+\.(kv_cache_(scale|offset)|fa\d?_?[qkv]\.(scale|offset))")
"""Names of scales for the KV cache and for the inputs of attention, which stay unquantized here."""
_ROTATIONS = ("heads_rotation", "kronecker_rotation")
_LOW_BITS = 0xFFFF_FFFF


class ModelSlim(Format):
    """The types of the layers of one checkpoint."""

    adds_biases = True

    def __init__(self, types: Mapping[str, str]) -> None:
        """Keep the type of each quantized layer."""
        self._types = types

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        description = settings["description"]
        types = {}
        for name, kind in description.items():
            if not name.endswith(".weight") or kind == _FLOAT:
                continue
            if kind not in _TYPES:
                why = f" ({_REASONS[kind]})" if kind in _REASONS else ""
                raise ValueError(
                    f"{name} has the type {kind}{why}, which is not supported; the supported types are "
                    f"{', '.join([_FLOAT, *_TYPES])}"
                )
            types[name] = kind
        rotated = (description.get("metadata") or {}).get("quarot") or {}
        for rotation in _ROTATIONS:
            if layers := (rotated.get(rotation) or {}).get("layers"):
                raise ValueError(
                    f"metadata.quarot.{rotation} rotates the input of {layers[0]} and others when the model runs, "
                    "which is not supported; QuaRot is supported if all rotations are part of the weights"
                )
        return cls(types)

    def stated_weights(self) -> AbstractSet[str]:
        return self._types.keys()

    def ignores(self, name: str) -> bool:
        weight, part = self.split(name)
        kind = self._types.get(weight)
        if kind is None:
            return _OF_CACHE.fullmatch(name) is not None
        if part == "bias":
            return kind == "W8A8"  # quant_bias contains it
        unused = _UNUSED | {_UNUSED_OF_MIX} if kind == "W8A8_MIX" else _UNUSED
        return (part in unused and part not in _TYPES[kind]) or _OF_CACHE.fullmatch(name) is not None

    def parts(self, weight: str, stored: AbstractSet[str]) -> tuple[AbstractSet[str], AbstractSet[str]]:
        kind = self._types.get(weight)
        return (frozenset() if kind is None else _TYPES[kind]), frozenset()

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        kind = self._types[name]
        weight = require("weight", parts["weight"], torch.int8)
        if weight.ndim != 2:
            raise ValueError(f"weight has shape {list(weight.shape)}; it must have two axes")
        if kind == "W8A8":
            return IntegerWeight(_static(parts))
        if kind == "W4A8_DYNAMIC":
            weight = _unpacked(weight)
        scales, offsets = (_of_groups(part, parts[part], weight) for part in ("weight_scale", "weight_offset"))
        zeros = offsets if offsets.any() else None
        if kind == "W8A16":
            return IntegerWeight(QuantizedWeight(weight, scales, zeros))
        if zeros is not None:
            raise ValueError(f"weight_offset has values other than 0, which the type {kind} does not allow")
        if scales.shape[1] > 1:
            raise ValueError(
                f"weight_scale has shape {list(scales.shape)}; only one scale per row is supported for {kind}"
            )
        return IntegerWeight(QuantizedWeight(weight, scales, rounds_input=True))


def _of_groups(name: str, tensor: Tensor, weight: Tensor) -> Tensor:
    """Return scales or offsets as float32 [outputs, groups]."""
    outputs = len(weight)
    if not tensor.is_floating_point() or tensor.ndim == 0 or len(tensor) != outputs:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must have floats, in {outputs} rows")
    return tensor.float().reshape(outputs, -1)


def _static(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    weight = parts["weight"]
    outputs = (len(weight),)
    scale, offset = (parts[name].flatten().float() for name in ("input_scale", "input_offset"))
    for name, values in (("input_scale", scale), ("input_offset", offset)):
        if len(values) != 1 or not values.isfinite().all():
            raise ValueError(f"{name} has {len(values)} values; it must have one finite value for the whole input")
    if not scale.item() > 0:
        raise ValueError(f"input_scale={scale.item()} must be positive")
    deq_scale = parts["deq_scale"].flatten()
    if deq_scale.dtype == torch.int64:  # the low half has the bits of a float32
        deq_scale = (deq_scale & _LOW_BITS).to(torch.uint32).view(torch.float32)
    require("deq_scale", deq_scale, torch.float32, outputs)
    bias = require("quant_bias", parts["quant_bias"].flatten(), torch.int32, outputs)
    static = StaticInput(scale.item(), offset.item(), deq_scale, bias, has_bias=True)
    scales = (deq_scale / scale).unsqueeze(1)
    return QuantizedWeight(weight, scales, rounds_input=True, static_input=static)


def _unpacked(packed: Tensor) -> Tensor:
    """Return the values of a weight of 4 bits, int8 [outputs, inputs]. Byte [i, k] has rows 2i (low) and 2i + 1."""
    low = (packed << 4) >> 4  # both shifts keep the sign
    return torch.stack([low, packed >> 4], 1).flatten(0, 1)
