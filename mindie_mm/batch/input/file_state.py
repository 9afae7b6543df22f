"""The attributes of input files that show whether a file has changed."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
from blake3 import blake3

from mindie_mm.batch.input.files import replacing
from mindie_mm.errors import StorageError, os_errors_as

STATES_FILE = "input-states.json"
"""Name of the file in a run's folder that records the states of the input files until the run is finished."""
_PIECE_BYTES = 1 << 16
_MAX_PIECES = 1024
DIGESTED_BYTES = _PIECE_BYTES * _MAX_PIECES
"""Maximum size in bytes of files that `digest_of` reads completely."""


class FileState(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a file that differ if the file has been changed or replaced."""

    size: int
    mtime_ns: int
    """Time of the last change of the content. Programs can set this time back."""
    ctime_ns: int
    """Time of the last change of content, owner, mode or names. Programs cannot set this time."""
    device: int
    inode: int
    version: str = ""
    """ETag or version of a file in an object store, which identifies its content. Its times, device and inode are 0."""

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Return the state of an open file."""
        status = os.fstat(descriptor)
        return cls(
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            device=status.st_dev,
            inode=status.st_ino,
        )

    def may_equal(self, other: FileState) -> bool:
        """Return whether the content may be the same even though the states differ.

        A new hard link or a new mode changes `ctime_ns`, and some network file systems renumber inodes.
        """
        return not self.version and (self.size, self.mtime_ns) == (other.size, other.mtime_ns)

    def difference(self, now: FileState) -> str:
        """Describe how a file that had this state has changed."""
        changes = []
        if self.version != now.version:
            changes.append(f"its version was {self.version} and is now {now.version}")
        if (self.device, self.inode) != (now.device, now.inode):
            changes.append("another file replaced it")
        if self.size != now.size:
            changes.append(f"its size was {self.size} and is now {now.size}")
        if self.mtime_ns != now.mtime_ns:
            changes.append(f"it was modified at {_time(now.mtime_ns)}")
        return ", ".join(changes) or f"its content was replaced at {_time(now.ctime_ns)}"


class InputStates(msgspec.Struct, frozen=True, kw_only=True):
    """States of a run's input files, in the order of the inputs."""

    begun: list[FileState] = []
    """States during the call that began the run."""
    now: list[FileState] = []
    """States during the last call, whose workers read the files."""

    def write(self, folder: Path) -> None:
        """Write the states into a run's folder. Raise StorageError if this fails."""
        with replacing(folder / STATES_FILE) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the states recorded in a run's folder. They are empty if the file is missing or damaged."""
        file = folder / STATES_FILE
        try:
            with os_errors_as(StorageError, f"{file} cannot be read"):
                return msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else cls()
        except msgspec.DecodeError:
            return cls()


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")


def digest_of(file: BinaryIO) -> str:
    """Return a digest of the whole file. For a file above `DIGESTED_BYTES`, digest its size and pieces of the file."""
    size = file.seek(0, os.SEEK_END)
    digest = blake3(str(size).encode())
    # The last piece ends at the end of the file, because the end of a Parquet file describes each of its pages.
    last = max(0, size - _PIECE_BYTES)
    pieces = max(1, min(_MAX_PIECES - 1, -(-last // _PIECE_BYTES)))
    for number in range(pieces + 1):
        file.seek(last * number // pieces)
        digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest(16)
