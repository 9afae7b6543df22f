"""Formats of quantized weights. Each file turns the tensors that a format stores for a weight into a `PackedWeight`.

`format_of` finds the format of a checkpoint, and `read_packed` reads the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.formats.bitsandbytes import BitsAndBytes
from mindie_mm.nn.weights.formats.compressed_tensors import CompressedTensors
from mindie_mm.nn.weights.formats.float8 import Float8
from mindie_mm.nn.weights.formats.gptq import AWQ, GPTQ
from mindie_mm.nn.weights.formats.modelslim import ModelSlim
from mindie_mm.nn.weights.formats.packed import Format, PackedWeight
from mindie_mm.nn.weights.quantized import method_of, quantization
from mindie_mm.nn.weights.stored_tensors import check_scaled, read_weights, weight_names

_FORMATS: Mapping[str, Sequence[type[Format]]] = {
    "modelslim": [ModelSlim],
    "compressed-tensors": [Float8, CompressedTensors],
    "fp8": [Float8],
    "mxfp8": [Float8],
    "fbgemm_fp8": [Float8],
    "gptq": [GPTQ],
    "awq": [AWQ],
    "bitsandbytes_4bit": [BitsAndBytes],
    "bitsandbytes_8bit": [BitsAndBytes],
}
"""Formats by the name of the quantization method."""


def format_of(checkpoint: Checkpoint) -> Format | None:
    """Return the format of a checkpoint's quantized weights, or None if they are plain or have another format.

    Raises:
        UnsupportedCheckpoint: The settings of the format are not supported.

    """
    if (settings := quantization(checkpoint)) is None:
        return None
    try:
        found = (kind.of(settings) for kind in _FORMATS.get(method_of(settings), ()))
        return next((one for one in found if one is not None), None)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantized with {method_of(settings)!r}: {error}. Use the unquantized checkpoint"
        ) from error


def read_packed(checkpoint: Checkpoint, packing: Format) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Yield the name and value of each weight, on the CPU. A packed weight is one object with all of its tensors.

    Raises:
        UnsupportedCheckpoint: A tensor of a packed weight is missing or wrong. The message names the tensor.

    """
    packed = packed_weights(checkpoint, packing)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_weights(checkpoint):
        if packing.ignores(name):
            continue
        weight, part = packing.split(name)
        if part not in packed.get(weight, ()):
            check_scaled(checkpoint, name, tensor.dtype)
            yield name, tensor
            continue
        parts = waiting.setdefault(weight, {})
        parts[part] = tensor
        if parts.keys() == packed[weight]:
            del waiting[weight]
            try:
                value = packing.weight(weight, parts)
            except (KeyError, ValueError, AssertionError, AttributeError, RuntimeError) as error:
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path}: the quantized weight {weight} ({', '.join(sorted(parts))}) cannot be read: "
                    f"{error}. Download the checkpoint again, or use the unquantized checkpoint"
                ) from error
            yield weight, value


def packed_weights(checkpoint: Checkpoint, packing: Format) -> dict[str, set[str]]:
    """Return the parts of each packed weight, without reading them.

    Raises:
        UnsupportedCheckpoint: A part is missing, or no weight is packed.

    """
    stored: dict[str, set[str]] = {}
    for name in weight_names(checkpoint):
        weight, part = packing.split(name)
        stored.setdefault(weight, set()).add(part)
    packed = {}
    for weight in sorted(stored.keys() | packing.stated_weights()):
        own = stored.get(weight, set())
        needed, optional = packing.parts(weight, own)
        if missing := sorted(needed - own):
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} lacks {weight.removesuffix('weight')}{missing[0]}, which the quantized weight "
                f"{weight} needs. Download the checkpoint again, or use the unquantized checkpoint"
            )
        if needed:
            packed[weight] = own & (needed | optional)
    if not packed:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} states the quantization {method_of(quantization(checkpoint) or {})!r}, but none of its "
            "weights is quantized. Remove the statement from config.json, or download the weights again"
        )
    return packed


__all__ = ["Format", "PackedWeight", "format_of", "packed_weights", "read_packed"]
