"""Writes all of some bytes to a file."""

from __future__ import annotations

import os


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at the file offset `offset`. Raise OSError if a write fails."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
