"""The journal of an open shard: the rows whose arrays have been written. A later call keeps these rows."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from mindie_mm.batch.output.shard_row import ShardRow, decode_hook, encode_hook
from mindie_mm.errors import StorageError, os_errors_as
from mindie_mm.processes.writing import write_all
from mindie_mm.shm.liveness_lock import LivenessLock, is_same

_encoder = msgspec.json.Encoder(enc_hook=encode_hook)
_decoder = msgspec.json.Decoder(ShardRow, dec_hook=decode_hook)


class _Kept(NamedTuple):
    row: ShardRow
    end: int
    """Offset in the journal after the row's line."""


class Journal:
    """A file with one line per row. Its lock keeps other processes from writing the shard."""

    def __init__(self, path: Path, run: str, first_row: int) -> None:
        """Open or create the journal of the shard that begins with `first_row`, and read its rows.

        Rows of another run, and lines that were not written completely, are ignored.

        Raises:
            StorageError: The file cannot be read or locked, or another process is writing the shard.

        """
        self._path = path
        with os_errors_as(StorageError, f"{path} cannot be opened"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            content = path.read_bytes()
            # A run locks its folder itself, and warns if the file system has no locks.
            self._lock = LivenessLock(descriptor, needed=False)
        except OSError as error:
            os.close(descriptor)
            why = "another process is writing the shard" if isinstance(error, BlockingIOError) else error.strerror
            raise StorageError(f"{path} cannot be locked: {why}") from error
        if not is_same(path, descriptor):
            self._lock.close()
            raise StorageError(f"{path} cannot be locked: another process has just finished the shard")
        self._head = msgspec.json.encode({"run": run}) + b"\n"
        self._end = len(self._head)
        self.kept = deque(_rows(content, first_row) if content.startswith(self._head) else ())
        """Rows of an earlier call that have not been taken yet."""

    def take(self) -> ShardRow:
        """Return the next row of an earlier call. `kept` must not be empty."""
        row, self._end = self.kept.popleft()
        return row

    def append(self, rows: Sequence[ShardRow]) -> None:
        """Write rows after the rows that were taken. Raise OSError if this fails."""
        lines = b"".join(_encoder.encode(msgspec.structs.replace(row, columns={})) + b"\n" for row in rows)
        os.ftruncate(self._lock.descriptor, self._end)
        write_all(self._lock.descriptor, memoryview(self._head), 0)
        write_all(self._lock.descriptor, memoryview(lines), self._end)
        self._end += len(lines)

    def remove(self) -> None:
        """Remove the file, because the shard is finished."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lock.close()


def forget_failures(folder: Path) -> None:
    """Remove the first failed row and all rows after it from each journal, so that a later call repeats them.

    Raises:
        StorageError: A journal cannot be read or written.

    """
    for path in folder.glob("shard-*.journal"):
        with os_errors_as(StorageError, f"{path} cannot be changed"):
            content = path.read_bytes()
            end = content.find(b"\n") + 1
            for row, stop in _rows(content, int(path.stem.removeprefix("shard-"))):
                if row.error is not None:
                    os.truncate(path, end)
                    break
                end = stop


def _rows(content: bytes, first_row: int) -> Iterator[_Kept]:
    """Yield the complete rows of a journal."""
    end = content.find(b"\n") + 1
    while stop := content.find(b"\n", end) + 1:
        try:
            row = _decoder.decode(content[end:stop])
        except msgspec.DecodeError:
            return
        if row.row != first_row:
            return
        first_row, end = first_row + 1, stop
        yield _Kept(row, end)
