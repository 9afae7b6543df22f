"""Writes to files so that nothing is missing, not even after a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at the file offset `offset`. Raise OSError if a write fails."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk. Raise OSError if this fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
