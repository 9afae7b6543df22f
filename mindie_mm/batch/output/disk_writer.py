"""Background writer of batches of arrays to a file.

While the writer writes a batch, the caller fills the next batch in private memory. Filling a mapping of the file would
take two to four times as long, because the file system allocates, clears and tracks each page.

The writer also computes the digest of each array, so the file need not be read again. The hash function is XXH3, which
is as fast as reading the data from memory. BLAKE3 would take 5% of the processing time of a row. The digest does not
protect against deliberate changes, because an attacker could replace the digest, too.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
from xxhash import xxh3_128_digest

from mindie_mm.errors import LimitExceeded, os_errors_as
from mindie_mm.processes.writing import write_all

WRITE_BATCH_BYTES = 16 * 2**20
"""Size of a batch's memory in bytes. Two batches are used alternately. A larger block gets its own batch."""


class StoredArray(msgspec.Struct):
    """Location and content of an array in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the file in bytes."""
    length: int
    """Size in bytes."""
    digest: bytes = b""
    """XXH3-128 of the bytes. Empty until the array has been written."""


class WriteBatchMemory:
    """Pool of batch memory, which several files can share. Faulting in the memory of two new batches takes 9 ms."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> mmap.mmap:
        """Return private memory of at least `nbytes` bytes with undefined contents.

        Raises:
            LimitExceeded: There is not enough memory.

        """
        if nbytes <= WRITE_BATCH_BYTES and self._spare:
            return self._spare.pop()
        with os_errors_as(LimitExceeded, f"there is no memory for a block of {nbytes} bytes"):
            # Private memory is allocated on first use, and can have huge pages, unlike shared memory.
            memory = mmap.mmap(-1, max(nbytes, WRITE_BATCH_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # without huge pages, the disk driver has to look up each small page
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def free(self, memory: mmap.mmap) -> None:
        """Return memory to the pool. The caller must not use the memory after this call."""
        if len(memory) == WRITE_BATCH_BYTES:
            self._spare.append(memory)


class WriteBatch:
    """Arrays that are contiguous both in memory and in the file."""

    __slots__ = ("arrays", "memory", "offset", "used_bytes")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.memory = memory
        self.offset = offset
        """Offset of the batch in the file, in bytes."""
        self.used_bytes = 0
        self.arrays: list[StoredArray] = []
        """Arrays of the batch, whose digests the writer computes."""

    @property
    def room_bytes(self) -> int:
        """Number of bytes that are free for more arrays."""
        return len(self.memory) - self.used_bytes

    @property
    def is_large(self) -> bool:
        """True if the batch consists of a single block that is larger than other batches."""
        return len(self.memory) > WRITE_BATCH_BYTES

    def cut(self, used_bytes: int) -> None:
        """Remove the arrays after the first `used_bytes` bytes."""
        self.used_bytes = used_bytes
        self.arrays = [array for array in self.arrays if array.offset < self.offset + used_bytes]


class DiskWriter:
    """Background writer of batches to one file. Not thread-safe.

    One batch is written at a time. Writes bypass the page cache (O_DIRECT) if the file system supports this.
    """

    def __init__(self, path: Path, descriptor: int, memory: WriteBatchMemory) -> None:
        """Prepare to write to the file `path`. `descriptor` is an open descriptor of the file. The caller closes it."""
        self._descriptor = descriptor
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "disk-writer")
        self._writing: Future[None] | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # some network file systems have no O_DIRECT
            self._direct = -1

    def write(self, batch: WriteBatch | None, then: Callable[[], object]) -> None:
        """Start writing a batch in the background, and call `then` after it has been written.

        The caller must not use the batch after this call. If the batch is a single large block, wait until it is
        written, so that only one large block is in memory.

        Raises:
            OSError: This write or an earlier one failed.

        """
        self.wait()
        self._writing = self._thread.submit(self._write, batch, then)
        if batch is not None and batch.is_large:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written. Raise OSError on every call after a write has failed."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Wait for the write in progress and stop the thread. Idempotent."""
        self._thread.shutdown()
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _write(self, batch: WriteBatch | None, then: Callable[[], object]) -> None:
        if batch is not None:
            data = memoryview(batch.memory)[: batch.used_bytes]
            if self._direct < 0 or not self._write_direct(data, batch.offset):
                write_all(self._descriptor, data, batch.offset)
            for array in batch.arrays:
                array.digest = xxh3_128_digest(data[array.offset - batch.offset :][: array.length])
            self._memory.free(batch.memory)
        then()

    def _write_direct(self, data: memoryview, offset: int) -> bool:
        """Write without the page cache. Return False if the logical blocks of the disk are larger than a page."""
        try:
            write_all(self._direct, data, offset)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True
