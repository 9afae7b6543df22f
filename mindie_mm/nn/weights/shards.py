"""The files of a checkpoint's weights, and checks that they are complete."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.folder_errors import check_link, check_pointer
from mindie_mm.nn.checkpoint.missing_files import also_missing, listed
from mindie_mm.nn.weights.quantized import description_file

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Names of a single file with all weights, unless ModelSlim wrote it.

If there are several files, their index has the additional suffix .index.json.
"""
_QUANTIZED, _INDEX = "quant_model_weight", ".index.json"
"""Beginning of the names of ModelSlim's files with weights, and the suffix of an index."""
_NUMBERED = re.compile(r"-\d+-of-\d+\.safetensors$")
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that safetensors reads."""
_WRAPPED = ".base_layer."
"""Part of the name of a weight that peft has wrapped in an adapter."""
_OTHER_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of a checkpoint's weights, in order. Read their headers, but no weights.

    Raises:
        UnsupportedCheckpoint: There are no weight files. A file is missing or truncated. A file lacks a weight that the
            index assigns to it.

    """
    for name in (*_quantized_names(checkpoint), *_NAMES):
        whole = checkpoint.path / name
        check_link(whole)
        if whole.is_file():
            _refuse_adapters(checkpoint, _check(whole) or ())
            return [whole]
        if weights := _indexed(checkpoint, f"{name}.index.json"):
            return _shards(checkpoint, weights, f"{name}.index.json")
    raise UnsupportedCheckpoint(_without_weights(checkpoint))


def _quantized_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names that a file with all weights may have if ModelSlim quantized the checkpoint.

    The name ends with the type of the weights in older releases, as in quant_model_weight_w8a8.safetensors.
    """
    if description_file(checkpoint) is None:
        return []
    names = {file.name.removesuffix(_INDEX) for file in checkpoint.path.glob(f"{_QUANTIZED}*")}
    return sorted(name for name in names if name.endswith(".safetensors") and not _NUMBERED.search(name))


def _indexed(checkpoint: Checkpoint, index: str) -> Mapping[str, str]:
    """Return the file name of each weight in an index, or {} if there is no index."""
    weights = checkpoint.json(index).get("weight_map", {})
    if not isinstance(weights, dict) or not all(isinstance(shard, str) for shard in weights.values()):
        raise UnsupportedCheckpoint(f"{checkpoint.path / index}: weight_map does not have a file for each weight")
    return weights


def _shards(checkpoint: Checkpoint, weights: Mapping[str, str], index: str) -> list[Path]:
    shards = [checkpoint.path / shard for shard in sorted({*weights.values()})]
    for file in shards:
        check_link(file)
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} lacks {len(missing)} of the {len(shards)} weight files that {index} lists: "
            f"{listed(missing)}. Download them again{also_missing(checkpoint.path, *missing)}"
        )
    held = {shard.name: _check(shard) for shard in shards}
    _refuse_adapters(checkpoint, weights)
    for name, shard in weights.items():
        if (names := held[shard]) is not None and name not in names:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: {index} assigns the weight {name} to {shard}, which does not have it; the "
                "index and the files belong to different checkpoints. Download them again"
            )
    return shards


def _check(file: Path) -> Sequence[str] | None:
    """Return the names of the weights in a safetensors file, or None for another format.

    Raises:
        UnsupportedCheckpoint: The file is truncated or damaged.

    """
    check_pointer(file)
    if not (size := file.stat().st_size):
        raise UnsupportedCheckpoint(f"{file} is empty. Download it again")
    if file.suffix != ".safetensors":
        _check_torch(file)
        return None
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"), file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if length > _MOST_HEADER_BYTES and len(start) == 8:
            raise UnsupportedCheckpoint(
                f"{file} is not a safetensors file: it begins with {start!r}. Download it again"
            )
        header = opened.read(length)
    try:
        if len(start) < 8 or len(header) < length:
            needed = 8 + length
        else:
            tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
            needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise UnsupportedCheckpoint(
            f"{file} cannot be read: its header is not a valid safetensors header ({error}). Download it again"
        ) from error
    if size < needed:
        raise UnsupportedCheckpoint(
            f"{file} is truncated: it has {size} bytes, but its header requires {needed}. Download it again"
        )
    return [*tensors]


def _check_torch(file: Path) -> None:
    """Raise UnsupportedCheckpoint unless `file` is a complete zip file or a pickle, the format before PyTorch 1.6."""
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"), file.open("rb") as opened:
        start = opened.read(8)
        is_whole = zipfile.is_zipfile(opened)
    if start.startswith(b"PK") and not is_whole:
        raise UnsupportedCheckpoint(f"{file} is truncated: it has no directory at its end. Download it again")
    if not start.startswith((b"PK", b"\x80")):
        raise UnsupportedCheckpoint(
            f"{file} was not written by torch.save: it begins with {start!r}. Download it again"
        )


def _refuse_adapters(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise UnsupportedCheckpoint for a model saved with an unmerged adapter. peft renames weights in that case.

    Some authors' own layouts also have such names. They are accepted if the checkpoint's renaming rules expect them.
    """
    if any(_WRAPPED in renaming.published for renaming in checkpoint.renamings or ()):
        return
    if name := next((name for name in names if _WRAPPED in name or ".lora_A." in name), None):
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} was saved with an active adapter: its weights have names such as {name}. Merge "
            "the adapter into the model with peft's merge_and_unload, save the merged model, and give its "
            "folder"
        )


def _without_weights(checkpoint: Checkpoint) -> str:
    """Return the message for a checkpoint without weights, with advice that depends on its other files."""
    why = f"{checkpoint.path} has no weights: neither model.safetensors nor pytorch_model.bin"
    names = sorted(file.name for file in checkpoint.path.iterdir() if file.suffix in _OTHER_SUFFIXES)
    if shards := [name for name in names if name.startswith(("model-0", "pytorch_model-0"))]:
        index = f"{'model.safetensors' if shards[0].endswith('.safetensors') else 'pytorch_model.bin'}.index.json"
        return f"{why}; it has {shards[0]}, but lacks {index}, the index of the weight files. Download the index"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{why}; {gguf[0]} is a GGUF file, a format of llama.cpp that is not supported. Use the original weights"
    if names:
        return (
            f"{why}; it has {names[0]}, which is not supported. Load it with the program that wrote it, and "
            "save it for transformers: model.save_pretrained(FOLDER) writes model.safetensors"
        )
    return why + also_missing(checkpoint.path, "model.safetensors")
