"""Reading of files with the features of a media item. A client has computed the features with the model's tower.

A file is safetensors or the output of `torch.save`, and contains one tensor.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from mindie_mm.errors import InputError, LimitExceeded, MediaError, panics_as
from mindie_mm.inputs import Embeddings
from mindie_mm.media.image.encoded_image import Data

_ZIP = b"PK\x03\x04"
"""First bytes of the output of `torch.save`, which is a zip archive."""
_RECORD = b"PK\1\2"
"""First bytes of a record's entry in the directory of an archive."""
_MAX_RECORDS = 64
"""Maximum number of records in an archive. `torch.save` writes fewer than ten for one tensor."""
_MAX_PICKLE_BYTES = 2**16
"""Maximum size of the pickle in an archive. One tensor needs about 200 bytes."""
_MAX_HEAD_BYTES = 2**16
"""Maximum size of the JSON header of a safetensors file. One tensor needs about 100 bytes."""
_INTEGERS = (torch.int32, torch.int64)
_MAX_GRID = 2**12
"""Maximum number of integers in a grid. Most grids have three, but in some families a video has one more per frame."""


def read_embeddings(data: Data, grid_key: str = "") -> Embeddings:
    """Return the features of one item from a file. If `data` is a tuple, its second file contains the grid.

    Error messages call the grid `grid_key`.

    Raises:
        InputError: The tensors have the wrong shape, dtype or values.
        LimitExceeded: A tensor needs more bytes than its file has, or a file exceeds another limit.
        MediaError: A file cannot be read.

    """
    files = data if isinstance(data, tuple) else (data,)
    tensor = _tensor(files[0], "the file of the embeddings")
    return Embeddings([tensor], _grid(files[1], grid_key) if len(files) > 1 else ())


def _grid(data: Any, key: str) -> list[int]:
    tensor = _tensor(data, f"the file of {key}")
    shape = [*tensor.shape]
    if tensor.dtype not in _INTEGERS or not 1 <= len(shape) <= 2 or shape[:-1] not in ([], [1]):
        raise InputError(f"{key} has dtype {_name(tensor)} and shape {shape}; it must be int32 or int64 [n] or [1, n]")
    if not 0 < tensor.numel() <= _MAX_GRID:
        raise LimitExceeded(f"{key} has {tensor.numel()} numbers; it must have 1 to {_MAX_GRID}")
    numbers: list[int] = tensor.reshape(-1).tolist()
    return numbers


def _tensor(data: Any, what: str) -> Tensor:
    """Return the tensor in a file. Error messages call the file `what`."""
    assert isinstance(data, bytes), "only files are encoded embeddings"
    tensor = _read_torch(data, what) if data.startswith(_ZIP) else _read_safetensors(data, what)
    # With strides of 0, a tensor in a small file may have any number of elements.
    if (
        tensor.is_nested
        or tensor.layout != torch.strided
        or tensor.is_neg()
        or tensor.numel() * tensor.itemsize > len(data)
    ):
        raise LimitExceeded(f"{what} must contain a dense tensor with all its elements; save a contiguous copy")
    return tensor.detach()


def _read_safetensors(data: bytes, what: str) -> Tensor:
    head_bytes = int.from_bytes(data[:8], "little")
    if not 0 < head_bytes <= len(data) - 8:
        raise MediaError(f"{what} is neither a complete safetensors file nor the output of torch.save")
    if head_bytes > _MAX_HEAD_BYTES:
        raise LimitExceeded(f"{what} has a safetensors header of {head_bytes} bytes; the limit is {_MAX_HEAD_BYTES}")
    try:
        with panics_as(MediaError, f"{what} cannot be read as safetensors"):
            tensors = load_safetensors(data)
    except (MemoryError, MediaError):
        raise
    except Exception as error:  # the library raises errors of many types
        raise MediaError(f"{what} cannot be read as safetensors: {str(error)[:200]}") from error
    if len(tensors) != 1:
        raise InputError(f"{what} is a safetensors file with {len(tensors)} tensors; it must have exactly one")
    (tensor,) = tensors.values()
    return tensor


def _read_torch(data: bytes, what: str) -> Tensor:
    try:
        _check_archive(data, what)
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (MemoryError, LimitExceeded):
        raise
    except Exception as error:  # a hostile file may cause an error of any type
        if "DefaultCPUAllocator" in str(error):
            raise MemoryError from error
        raise MediaError(
            f"{what} cannot be read with torch.load and weights_only=True; save one tensor with torch.save, or send "
            "safetensors"
        ) from error
    if type(loaded) not in (Tensor, torch.nn.Parameter) or loaded.device.type != "cpu":
        raise InputError(f"{what} contains an object of type {type(loaded).__name__}; save a single CPU tensor")
    return loaded  # type: ignore[no-any-return] # checked above


def _check_archive(data: bytes, what: str) -> None:
    """Raise LimitExceeded if an archive is compressed, or has so many records or opcodes that reading takes long.

    `torch.save` does not compress its archives.
    """
    if (count := data.count(_RECORD)) > _MAX_RECORDS:  # `ZipFile` reads all entries
        raise LimitExceeded(f"{what} is an archive of {count} records; the limit is {_MAX_RECORDS}")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise LimitExceeded(f"{what} is a compressed archive; send the output of torch.save unchanged")
    if sum(record.file_size for record in records) > len(data):
        raise LimitExceeded(
            f"{what} is an archive whose records have more bytes than the archive; send the output of torch.save "
            "unchanged"
        )
    for record in records:
        if record.filename.endswith(".pkl") and record.file_size > _MAX_PICKLE_BYTES:
            raise LimitExceeded(
                f"{what} is an archive with a pickle of {record.file_size} bytes; the limit is {_MAX_PICKLE_BYTES}"
            )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
