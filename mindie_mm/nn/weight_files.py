"""The files of a checkpoint's weights, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint import Checkpoint

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What a model can have, by safetensors' names."""


def read_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by its name, on the CPU, from the files one after another."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - no mapping
                        yield name, weights.get_tensor(name)
            else:
                yield from _load(file).items()


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all weights, of which none is read."""
    return [name for name, _ in _dtypes(checkpoint)]


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of the first weight that is stored as a model can have it; float32 where none is. UnsupportedCheckpoint."""
    return next((dtype for _, dtype in _dtypes(checkpoint) if dtype in _STORED.values()), torch.float32)


def _dtypes(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.dtype | None]]:
    """Each weight's name and dtype, none of which is read; None for a dtype that no model has."""
    for file in weight_files(checkpoint):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 - no mapping
                        yield name, _STORED.get(weights.get_slice(name).get_dtype())
            else:
                yield from ((name, tensor.dtype) for name, tensor in _load(file).items())


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
