"""Writes blocks to a file: while one is on its way to the disk, the next is filled."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from mindie_mm.shm.disk_digest import DIGEST_BYTES

# Smaller ones go through the page cache, which gathers them; for a larger one its copy costs more than it saves.
_DIRECT_BYTES = 256 * 2**10

# Larger ones are written before the caller goes on, so that no two of them are in memory.
MAX_AHEAD_BYTES = 64 * 2**20


class DiskWriter:
    """One write at a time, past the page cache where the file system can. For one thread at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """`descriptor` is an open one of the file `path`, and stays the caller's."""
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, "disk-writer")
        self._writing: Future[bytes] | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # such as some network file systems
            self._direct = -1

    def write(self, data: memoryview, offset: int) -> Future[bytes]:
        """Begins to write whole pages at `offset`; the result is their digest, BLAKE3, 128 bits.

        OSError if this write fails or the one before it did. `data` is the writer's until `wait`, or the next `write`.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, data, offset)
        if len(data) < _DIRECT_BYTES or len(data) > MAX_AHEAD_BYTES:
            self.wait()
        return self._writing

    def wait(self) -> None:
        """Until everything is written. OSError, again and again, once a write has failed."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Ends what is being written. Idempotent."""
        self._thread.shutdown()
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _write(self, data: memoryview, offset: int) -> bytes:
        digest = blake3(data).digest(DIGEST_BYTES)
        if self._direct >= 0 and len(data) >= _DIRECT_BYTES:
            try:
                write_all(self._direct, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a disk whose blocks are larger than a page
                    raise
            else:
                return digest
        write_all(self._descriptor, data, offset)
        return digest


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """All bytes of `data`, at `offset`. OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
