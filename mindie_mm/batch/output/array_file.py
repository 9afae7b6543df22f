"""Files of arrays in safetensors format (docs/wire-format.md), and their writer.

Any safetensors reader can open a file. `safetensors.save_file` is not used, because it needs all arrays in memory.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from mindie_mm.batch.input.files import sync_folder
from mindie_mm.batch.input.remote import RemoteFile
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.batch.output.disk_writer import DiskWriter, StoredArray, WriteBatch, WriteBatchMemory
from mindie_mm.batch.output.journal import Journal
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.errors import CorruptReference, LimitExceeded, StorageError, os_errors_as
from mindie_mm.processes.writing import write_all
from mindie_mm.shm import ArraySpec

BLOCK_BYTES = 4096
"""Alignment of the arrays of each item, which writes without the page cache need."""
HEADER_BYTES = 1 << 19
"""Space for the header, which is written last."""
SAVE_INTERVAL_S = 5.0
"""Time in seconds after which finished rows are written to disk, although their batch has room for more."""

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "bool": "BOOL",
    **{f"{sign}int{8 * size}": f"{sign.upper() or 'I'}{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
}
"""Names of numpy's dtypes in safetensors."""
_NUMPY_DTYPES = {stored: dtype for dtype, stored in _DTYPES.items()}
_PADDING = "padding"
_PIECE_BYTES = 1 << 20


def file_bytes(num_bytes: int) -> int:
    """Return the size of a finished file with blocks of `num_bytes` bytes in total."""
    return HEADER_BYTES + num_bytes if num_bytes else _LENGTH.size + len(b"{}")


class ArrayFile:
    """Writer of a file of arrays. It is a context manager and not thread-safe.

    `finish` completes the file. If the context exits earlier, the journal contains the rows whose arrays were written,
    and a later writer can `keep` these rows. Equal arrays in the same order produce equal files.
    """

    def __init__(self, path: Path, journal: Journal, memory: WriteBatchMemory) -> None:
        """Open the file at `path`. It is overwritten after the rows that the caller keeps.

        Raises:
            StorageError: The file cannot be opened.

        """
        self.path = path
        self._journal = journal
        self._memory = memory
        with os_errors_as(StorageError, f"{path} cannot be written"):
            if not journal.kept:
                path.unlink(missing_ok=True)  # other processes may have mapped an earlier file
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._writer = DiskWriter(path, self._descriptor, memory)
        self._batch: WriteBatch | None = None
        self._arrays: list[StoredArray] = []
        self._entries: list[bytes] = []
        """Entries of the header, one per array."""
        self._head_bytes = _LENGTH.size + len(b"{}")
        self._end = HEADER_BYTES
        self._rows: list[ShardRow] = []
        """Finished rows that are not in the journal yet."""
        self._saved_s = time.monotonic()

    @property
    def used_bytes(self) -> int:
        """Total size of the blocks in bytes."""
        return self._end - HEADER_BYTES

    @property
    def is_half_full(self) -> bool:
        """True if more than half of the header is used."""
        return self._head_bytes > HEADER_BYTES // 2

    def allocate(
        self, prefix: str, specs: Mapping[str, ArraySpec]
    ) -> tuple[list[StoredArray], dict[str, NDArray[Any]]]:
        """Append a block with uninitialized arrays. After an error, call `roll_back`.

        Args:
            prefix: First part of the names of the arrays.
            specs: Arrays by name.

        Returns:
            The locations of the arrays, and the arrays by name. Fill them before the next call to a method.

        Raises:
            LimitExceeded: The header has no room for the arrays, or there is not enough memory.
            StorageError: The file cannot be written.

        """
        start, stored = self._end, dict[str, StoredArray]()
        at = start
        # Larger elements come first, so that all arrays are aligned without gaps, which the format does not allow.
        for name, spec in sorted(specs.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize):
            stored[name] = StoredArray(name, spec.dtype, spec.shape, at, spec.nbytes)
            at += spec.nbytes
        self._append(prefix, [*stored.values()])
        batch = self._batch_for(self._end - start, start)
        batch.used_bytes += self._end - start
        batch.arrays += stored.values()
        batch.memory[at - batch.offset : batch.used_bytes] = bytes(self._end - at)
        arrays: dict[str, NDArray[Any]] = {
            name: np.ndarray(spec.shape, spec.dtype, batch.memory, stored[name].offset - batch.offset)
            for name, spec in specs.items()
        }
        return [stored[name] for name in specs], arrays

    def end_row(self, row: ShardRow) -> None:
        """Take a finished row. It is added to the journal when its arrays have been written.

        Raises:
            StorageError: The file cannot be written.

        """
        self._rows.append(row)
        is_large = self._batch is not None and self._batch.is_large  # do not keep a large block in memory
        if is_large or time.monotonic() - self._saved_s > SAVE_INTERVAL_S:
            self._save()

    def mark(self) -> tuple[int, int, int]:
        """Return the current state, which `roll_back` can restore."""
        return len(self._arrays), self._head_bytes, self._end

    def roll_back(self, mark: tuple[int, int, int]) -> None:
        """Remove all arrays that were appended after `mark`."""
        num_arrays, self._head_bytes, self._end = mark
        del self._arrays[num_arrays:], self._entries[num_arrays:]
        if self._batch is not None and self._batch.offset <= self._end:
            self._batch.cut(min(self._batch.used_bytes, self._end - self._batch.offset))
        elif self._batch is not None:
            self._memory.free(self._batch.memory)
            self._batch = None

    def keep(self, row: ShardRow) -> bool:
        """Append the arrays of a row that an earlier writer has written. Return False if they are damaged."""
        mark = self.mark()
        for index, arrays in enumerate(row.arrays or ()):
            start, known = self._end, len(self._arrays)
            try:
                self._append(f"{row.row}.{index}", sorted(arrays, key=lambda array: array.offset))
                data = memoryview(os.pread(self._descriptor, self._end - start, start))
            except (LimitExceeded, OSError, LookupError, MemoryError, OverflowError, ValueError):  # a changed journal
                self.roll_back(mark)
                return False
            at = 0
            for array in self._arrays[known:]:
                content = data[at : at + array.length]
                if array.offset != start + at or xxh3_128_digest(content) != array.digest:
                    self.roll_back(mark)
                    return False
                at += array.length
        return True

    def finish(self) -> str:
        """Complete the file, sync it to disk and return its digest.

        Raises:
            StorageError: The file cannot be written.

        """
        self._rows.clear()  # the table is written next
        self._save()
        with self._writing():
            self._writer.wait()
            head = b"{" + b",".join(self._entries) + b"}"
            head = head.ljust(HEADER_BYTES - _LENGTH.size) if self._arrays else head
            head = _LENGTH.pack(len(head)) + head
            write_all(self._descriptor, memoryview(head), 0)
            os.ftruncate(self._descriptor, file_bytes(self.used_bytes))
            os.fsync(self._descriptor)
            sync_folder(self.path.parent)
        return _combined(head, [array.digest for array in self._arrays])

    def close(self) -> None:
        """Wait for the write in progress and close the file. Idempotent."""
        self._writer.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, prefix: str, arrays: Sequence[StoredArray]) -> None:
        """Append the entries of arrays, which are contiguous in the file, and the entry of their padding."""
        end = arrays[-1].offset + arrays[-1].length
        if rest := -end % BLOCK_BYTES:
            zeros = xxh3_128_digest(bytes(rest))
            arrays = [*arrays, StoredArray(_PADDING, "uint8", (rest,), end, rest, zeros)]
        for array in arrays:
            start = array.offset - HEADER_BYTES
            entry = {
                "dtype": _DTYPES[array.dtype],
                "shape": array.shape,
                "data_offsets": (start, start + array.length),
            }
            self._entries.append(msgspec.json.encode({f"{prefix}.{array.name}": entry})[1:-1])
            self._arrays.append(array)
            self._head_bytes += len(self._entries[-1]) + 1
        self._end = end + rest
        if self._head_bytes > HEADER_BYTES:
            raise LimitExceeded(
                f"the row has more media items than a shard can list: the header has room for {HEADER_BYTES} bytes. "
                "Split the row"
            )

    def _batch_for(self, nbytes: int, offset: int) -> WriteBatch:
        """Return a batch with room for the next block."""
        if self._batch is None or self._batch.room_bytes < nbytes:
            self._save()
            self._batch = WriteBatch(self._memory.allocate(nbytes), offset)
        return self._batch

    def _save(self) -> None:
        """End the current batch and start to write it. Its finished rows are then added to the journal."""
        batch, self._batch = self._batch, None
        rows, self._rows = self._rows, []
        self._saved_s = time.monotonic()
        if batch is not None or rows:
            with self._writing():
                self._writer.write(batch, lambda: self._journal.append(rows))

    def _writing(self) -> AbstractContextManager[None]:
        return os_errors_as(StorageError, f"{self.path} cannot be written")


def digest_of(path: Path) -> str:
    """Compute the digest of a file from its contents. `read_arrays` lists the errors."""
    return read_arrays(path)[0]


def read_arrays(path: Path | RemoteFile) -> tuple[str, int, dict[str, StoredArray]]:
    """Read a file in small pieces, and compute its digest and the digest of each array.

    The file is not mapped, because reading a mapped file from a faulty disk would end the process with SIGBUS.

    Returns:
        The digest of the file, which equals the result of `finish` if the file is intact, its size in bytes, and the
        arrays by their names in the file. Paddings are left out.

    Raises:
        CorruptReference: The file is not a complete file of arrays.
        OSError: The file cannot be read.

    """
    with path.open("rb") as file:
        if (size := file.seek(0, os.SEEK_END)) < _LENGTH.size:
            raise CorruptReference(f"{path} is truncated: it has {size} bytes")
        file.seek(0)
        head = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if _LENGTH.size + length > HEADER_BYTES:
            raise CorruptReference(
                f"{path} has a damaged header: it has {length} bytes, but at most {HEADER_BYTES} fit"
            )
        head += file.read(length)
        try:
            entries = msgspec.json.decode(head[_LENGTH.size :], type=dict[str, _Entry])
        except (*NOT_JSON, RecursionError) as error:
            raise CorruptReference(f"{path} has a damaged header: {error}") from error
        arrays, at, buffer = dict[str, StoredArray](), 0, memoryview(bytearray(_PIECE_BYTES))
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            start, stop = entry.data_offsets
            if start != at or stop < start:
                raise CorruptReference(
                    f"{path} has a damaged header: {name} does not begin where the array before ends"
                )
            digest = xxh3_128()
            while at < stop and (count := file.readinto(buffer[: stop - at])):
                digest.update(buffer[:count])
                at += count
            at = stop  # a truncated file ends earlier
            arrays[name] = StoredArray(
                name.split(".", 2)[-1],
                _NUMPY_DTYPES.get(entry.dtype, entry.dtype),
                entry.shape,
                len(head) + start,
                stop - start,
                digest.digest(),
            )
    if len(head) + at != size:
        raise CorruptReference(f"{path} has {size} bytes, but its header requires {len(head) + at}")
    combined = _combined(head, [array.digest for array in arrays.values()])
    return combined, size, {name: array for name, array in arrays.items() if array.name != _PADDING}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _combined(head: bytes, digests: Sequence[bytes]) -> str:
    """Return the XXH3-128 of the header and of the digests of all arrays in file order, in hexadecimal."""
    return xxh3_128_hexdigest(head + b"".join(digests))
