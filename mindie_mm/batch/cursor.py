"""Shared memory that contains the number of a worker's current row. If the worker dies, the run reads this number."""

from __future__ import annotations

import os
from typing import Self

from mindie_mm.errors import StorageError, os_errors_as

_BYTES = 8


class RowCursor:
    """Row number that a run shares with one of its workers. Use the cursor as a context manager."""

    def __init__(self, descriptor: int) -> None:
        """Take ownership of a file descriptor. Call `create` or `open` instead."""
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> Self:
        """Create the cursor in the run's process."""
        return cls(os.memfd_create("row", os.MFD_CLOEXEC))

    @classmethod
    def open(cls, path: str) -> Self:
        """Open the cursor at `path` in the worker. Raise StorageError if this fails."""
        with os_errors_as(StorageError, f"{path} cannot be opened (is /proc mounted?)"):
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Path that another process of the same user can `open`, as long as the cursor is open in this process."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def row(self) -> int:
        """The last row that the worker began."""
        return int.from_bytes(os.pread(self._descriptor, _BYTES, 0), "little")

    def move_to(self, row: int) -> None:
        """Record that the worker begins this row."""
        os.pwrite(self._descriptor, row.to_bytes(_BYTES, "little"), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
