"""The arrays of rows, as views of a mapped file or of bytes that were fetched from an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from mindie_mm.batch.input.remote import RemoteFile, read_ranges, reading_run
from mindie_mm.batch.output.array_file import file_bytes
from mindie_mm.batch.output.disk_writer import StoredArray
from mindie_mm.batch.output.shard import ShardInfo, arrays_path
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.errors import CorruptReference, InputError, LimitExceeded
from mindie_mm.shm import ArraySpec

Arrays = list[dict[str, NDArray[Any]]]
"""Arrays of each media item of a row, by name."""


def specs_of(row: ShardRow, path: Path | RemoteFile, size: int) -> list[dict[str, ArraySpec]]:
    """Return the shapes and types of the arrays of each media item of a row, by name.

    Raises:
        CorruptReference: An array is not valid, or is not inside the file `path`, which has `size` bytes.

    """
    found = list[dict[str, ArraySpec]]()
    for arrays in row.arrays or ():
        found.append({})
        for array in arrays:
            try:
                spec = ArraySpec(array.shape, array.dtype)
            except (InputError, LimitExceeded) as error:
                raise CorruptReference(f"row {row.row} has a damaged array {array.name}: {error}") from None
            stop = array.offset + spec.nbytes
            if array.length != spec.nbytes or not 0 <= array.offset < stop <= size:
                raise CorruptReference(
                    f"{path} has {size} bytes, but its array {array.name} of row {row.row} is at bytes {array.offset} "
                    f"to {stop - 1}"
                )
            found[-1][array.name] = spec
    return found


def views(row: ShardRow, specs: Sequence[Mapping[str, ArraySpec]], data: memoryview | bytes, start: int = 0) -> Arrays:
    """Return the arrays of a row as read-only views of `data`, which begins at the offset `start` of the file."""
    return [
        {
            array.name: np.ndarray(own[array.name].shape, own[array.name].dtype, data, array.offset - start)
            for array in arrays
        }
        for arrays, own in zip(row.arrays or (), specs, strict=True)
    ]


def fetch(folder: RemoteFile, rows: Sequence[tuple[ShardRow, ShardInfo]]) -> list[Arrays]:
    """Fetch the arrays of rows at the same time, with one request per row, and compare the digest of each array.

    Args:
        folder: Folder of the run.
        rows: Rows, each with its shard.

    Raises:
        CorruptReference: A file is missing, or has been changed since the run.
        StorageError: The store fails.

    """
    paths = [arrays_path(folder, info.first_row) for _, info in rows]
    specs = [specs_of(row, path, file_bytes(info.num_bytes)) for (row, info), path in zip(rows, paths, strict=True)]
    wanted = {
        index: (
            paths[index],
            min(array.offset for array in arrays),
            max(array.offset + array.length for array in arrays),
        )
        for index, (row, _) in enumerate(rows)
        if (arrays := _arrays(row))  # the arrays of a row are contiguous
    }
    with reading_run(folder):
        fetched = dict(zip(wanted, read_ranges([*wanted.values()]), strict=True))
    found = list[Arrays]()
    for index, (row, info) in enumerate(rows):
        path, start, stop = wanted.get(index, (paths[index], 0, 0))
        data = fetched.get(index, b"")
        if isinstance(data, OSError) or len(data) != stop - start:
            with reading_run(path):
                _raise_reason(path, file_bytes(info.num_bytes), data)
        require_digests(row, path, data, start)
        found.append(views(row, specs[index], data, start))
    return found


def _raise_reason(path: RemoteFile, size: int, data: bytes | OSError) -> NoReturn:
    """Raise the error for a range that was not fetched completely.

    `size` is the file's original size in bytes. `data` is the error of the store, or the part of the range that it
    sent.
    """
    if (now := path.size()) != size:  # stores answer in different ways if a file ends before the range
        raise CorruptReference(f"{path} has {now} bytes, but the run wrote {size}")
    raise data if isinstance(data, OSError) else OSError(0, f"the store sent only {len(data)} bytes")


def require_digests(row: ShardRow, path: Path | RemoteFile, data: memoryview | bytes, start: int = 0) -> None:
    """Raise CorruptReference unless `data`, at the offset `start` of the file, are the arrays of the row."""
    content = memoryview(data)
    for array in _arrays(row):
        if xxh3_128_digest(content[array.offset - start : array.offset - start + array.length]) != array.digest:
            raise CorruptReference(
                f"{path} was changed after the run: the array {array.name} of row {row.row} has another digest than in "
                "its table"
            )


def _arrays(row: ShardRow) -> list[StoredArray]:
    return [array for arrays in row.arrays or () for array in arrays]
