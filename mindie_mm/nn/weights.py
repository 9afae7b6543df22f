"""A checkpoint's weights into modules written here, strictly: each weight by its name, each of its shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.pretrained import check_shapes, check_weights
from mindie_mm.nn.quantized import refuse_quantized
from mindie_mm.nn.shares import refuse_shares

M = TypeVar("M", bound=nn.Module)

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What a model can have, by safetensors' names."""


def build(
    make: Callable[[], M], checkpoint: Checkpoint, device: Device, dtype: torch.dtype, *, unused: Sequence[str] = ()
) -> M:
    """The module that `make` makes, with the checkpoint's weights as `dtype` on `device`, for inference alone.

    `unused` are patterns (fnmatch) of weights that the checkpoint may have beside the module's own.
    UnsupportedCheckpoint names what is missing, unknown or of another shape.
    """
    refuse_quantized(checkpoint)
    refuse_shares(checkpoint)
    with torch.device("meta"):
        module = make()
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found: dict[str, Tensor] = {}
    unexpected: list[str] = []
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name, tensor in _read(checkpoint):
        if name not in expected:
            unexpected.append(name)
        elif tuple(tensor.shape) != expected[name]:
            misfits.append((name, tuple(tensor.shape), expected[name]))
        else:
            found[name] = tensor.to(device.torch_device, dtype)
    check_shapes(checkpoint, misfits)
    check_weights(checkpoint, sorted(expected.keys() - found.keys()), unexpected, unused)
    module.load_state_dict(found, assign=True)
    return module.requires_grad_(False).eval()


def _read(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Each weight by its name, on the CPU, from the files one after another."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - no mapping
                        yield name, weights.get_tensor(name)
            else:
                yield from _load(file).items()


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of the first weight that is stored as a model can have it; float32 where none is. UnsupportedCheckpoint."""
    return next(
        (dtype for dtype in _dtypes(checkpoint) if dtype is not None and dtype in _STORED.values()), torch.float32
    )


def _dtypes(checkpoint: Checkpoint) -> Iterator[torch.dtype | None]:
    """Of each weight, none of which is read; None for one that safetensors alone has."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    yield from (_STORED.get(weights.get_slice(name).get_dtype()) for name in weights.keys())  # noqa: SIM118
            else:
                yield from (tensor.dtype for tensor in _load(file).values())


def _load(file: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return weights


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UnsupportedCheckpoint(f"{file} cannot be read: {error}") from error


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files of a checkpoint's weights, in order. UnsupportedCheckpoint where there are none, or one is missing."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (whole := checkpoint.path / name).is_file():
            return [whole]
        if weights := checkpoint.json(f"{name}.index.json").get("weight_map"):
            shards = [checkpoint.path / shard for shard in sorted(set(weights.values()))]
            if missing := [shard.name for shard in shards if not shard.is_file()]:
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path} lacks {len(missing)} of {len(shards)} files of weights, first {missing[0]}"
                )
            return shards
    raise UnsupportedCheckpoint(f"{checkpoint.path} has no weights: neither model.safetensors nor pytorch_model.bin")
