"""The row that a worker is at, in memory that outlives it: nobody need be told of each row to know where it ended."""

from __future__ import annotations

import os
from typing import Self

from mindie_mm.errors import StorageError, os_errors_as

_BYTES = 8


class RowCursor:
    """One number that a run and its worker share. A context manager."""

    def __init__(self, descriptor: int) -> None:
        """For `create` and `open`; the cursor owns `descriptor`."""
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> Self:
        """The run's."""
        return cls(os.memfd_create("row", os.MFD_CLOEXEC))

    @classmethod
    def open(cls, path: str) -> Self:
        """The worker's, at the `path` of the run's. StorageError."""
        with os_errors_as(StorageError, f"{path} cannot be opened (is /proc mounted?)"):
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where a process of the same user finds it while it is open here."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def row(self) -> int:
        """The one that it was moved to last."""
        return int.from_bytes(os.pread(self._descriptor, _BYTES, 0), "little")

    def move_to(self, row: int) -> None:
        """Says that the row is begun."""
        os.pwrite(self._descriptor, row.to_bytes(_BYTES, "little"), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
