"""Readers of a checkpoint's weights, and of their names and dtypes without the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint, panics_as
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.shards import weight_files

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which a model can run."""
_BY_NAME = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BY_NAME |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8}
_BY_NAME |= {"I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}
"""Dtypes by their names in safetensors."""


def read_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each weight, on the CPU, in the order of the files."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - not a mapping
                        yield name, weights.get_tensor(name)
            else:
                yield from _load(file).items()


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all weights without reading the weights."""
    return [name for name, _ in _dtypes(checkpoint)]


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the first weight whose dtype is in `PLAIN`, or float32 if there is no such weight."""
    dtypes = (dtype for _, dtype in _dtypes(checkpoint))
    return next((dtype for dtype in dtypes if dtype is not None and dtype in PLAIN), torch.float32)


def check_stored(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint if an unquantized checkpoint has weights that would need scales.

    Files that torch.save wrote before PyTorch 1.6 are not checked, because the check would read all their tensors.
    """
    first = weight_files(checkpoint)[0]
    if first.suffix == ".safetensors" or is_zipfile(first):
        for name, dtype in _dtypes(checkpoint):
            check_scaled(checkpoint, name, dtype)


def check_scaled(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> None:
    """Raise UnsupportedCheckpoint if the tensor `name` needs scales. The checkpoint contains no scales for it.

    Integers wider than a byte are accepted in tensors other than weights and biases. Such tensors may be integers in
    the model too, for example positions.
    """
    is_byte = dtype is not None and dtype.itemsize == 1 and dtype != torch.bool
    if dtype is not None and (is_byte or name.endswith(("weight", "bias"))):
        require_floats(checkpoint, name, dtype)


def require_floats(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedCheckpoint unless a weight is stored as floats of at least 16 bits.

    Integers and 8-bit floats would otherwise be loaded as if they needed no scales.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: {name} is stored as {str(dtype).removeprefix('torch.')}, but neither "
            "config.json nor other tensors describe how it was quantized. Use the unquantized checkpoint"
        )


def _dtypes(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield the name and dtype of each weight, without reading the weight. The dtype is None if PyTorch lacks it."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - not a mapping
                        yield name, _BY_NAME.get(weights.get_slice(name).get_dtype())
            else:
                yield from ((name, tensor.dtype) for name, tensor in _load(file).items())


def _load(file: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return weights


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        with panics_as(UnsupportedCheckpoint, f"{file} cannot be read"):
            yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UnsupportedCheckpoint(f"{file} cannot be read: {error}") from error
