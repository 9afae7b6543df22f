"""Writes blocks to a file, many at a time: while one batch of them is on its way to the disk, the next is filled."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128_digest

from mindie_mm.errors import LimitExceeded, os_errors_as

WRITE_BATCH_BYTES = 16 * 2**20
"""Memory of a batch, of which two are used in turn; a larger block is a batch of its own."""


class WriteBatchMemory:
    """Memory of batches that were written, for the next ones, of whichever file: to fault two in takes 9 ms."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """Private memory of `nbytes` or more, with whatever is in it. LimitExceeded where there is none."""
        if nbytes <= WRITE_BATCH_BYTES and self._spare:
            return self._spare.pop()
        with os_errors_as(LimitExceeded, f"there is no memory for a block of {nbytes} bytes"):
            # It takes memory where it is used; were it shared, there would be no huge pages.
            memory = mmap.mmap(-1, max(nbytes, WRITE_BATCH_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them: the disk's driver then looks up each small page
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def give_back(self, memory: mmap.mmap) -> None:
        """Nobody writes to it, or reads it, any more."""
        if len(memory) == WRITE_BATCH_BYTES:
            self._spare.append(memory)


class WriteBatch:
    """Blocks that lie one behind another, in whole pages, both in memory and in the file."""

    __slots__ = ("blocks", "memory", "num_filling", "offset", "used_bytes")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.memory = memory
        self.offset = offset
        """Where in the file the batch begins."""
        self.used_bytes = 0
        self.num_filling = 0
        """Its blocks that somebody still writes to."""
        self.blocks: dict[int, slice] = {}
        """Where in `memory` its other blocks lie, by entry."""

    @property
    def room_bytes(self) -> int:
        """Bytes left for further blocks."""
        return len(self.memory) - self.used_bytes

    def cut(self, used_bytes: int) -> None:
        """Takes out the blocks behind its first `used_bytes`."""
        self.used_bytes = max(0, min(self.used_bytes, used_bytes))
        self.blocks = {entry: place for entry, place in self.blocks.items() if place.start < self.used_bytes}


class DiskWriter:
    """One write at a time, past the page cache where the file system can. For one thread at a time."""

    def __init__(self, path: Path, descriptor: int, memory: WriteBatchMemory) -> None:
        """`descriptor` is an open one of the file `path`, and stays the caller's."""
        self._descriptor = descriptor
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "disk-writer")
        self._writing: Future[None] | None = None
        self.digests: dict[int, bytes] = {}
        """XXH3, 128 bits, of the blocks that were written, by entry: computed beside what fills the next batch."""
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # such as some network file systems
            self._direct = -1

    def batch(self, nbytes: int, offset: int) -> WriteBatch:
        """An empty one with room for a block of `nbytes` at `offset`. LimitExceeded where there is no memory for it."""
        return WriteBatch(self._memory.take(nbytes), offset)

    def write(self, batch: WriteBatch) -> None:
        """Begins to write a batch, which is the writer's from here on; one of a single large block is written at once.

        So no two large blocks are in memory. OSError if this write fails, or one before it did.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, batch)
        if len(batch.memory) > WRITE_BATCH_BYTES:
            self.wait()

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

    def _write(self, batch: WriteBatch) -> None:
        data = memoryview(batch.memory)[: batch.used_bytes]
        if self._direct < 0 or not self._write_direct(data, batch.offset):
            write_all(self._descriptor, data, batch.offset)
        self.digests |= {entry: xxh3_128_digest(data[place]) for entry, place in batch.blocks.items()}
        self._memory.give_back(batch.memory)

    def _write_direct(self, data: memoryview, offset: int) -> bool:
        """False of a disk whose blocks are larger than a page."""
        try:
            write_all(self._direct, data, offset)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """All bytes of `data`, at `offset`. OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk, if its file system supports this.

    Raises:
        OSError: The sync failed.

    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and some FUSE file systems can only sync files
            raise
    finally:
        os.close(descriptor)
