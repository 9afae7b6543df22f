"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from mindie_mm import faults
from mindie_mm.errors import StorageError, os_errors_as

_PIECE = 1 << 20


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Gives a path to write to; on leaving, that file is synced and gets the name `path`. StorageError.

    `writer` tells the unfinished file from those of others that write to `path` at the same time.
    """
    unfinished = path.with_name(f"{path.name}{writer and '.' + writer}.partial")
    try:
        with os_errors_as(StorageError, f"{path} cannot be written"):
            yield unfinished
            sync(unfinished)
            faults.point(f"written {path.name}")
            unfinished.rename(path)
            sync(path.parent)
            faults.point(f"named {path.name}")
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Has a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, 128 bits of it."""
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest(16)
