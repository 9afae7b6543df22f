"""Background writer of batches of blocks to a file on disk, and the digest that detects damage to the file.

While the writer writes a batch, the caller fills the next batch. The writer also computes the digests of the blocks,
and the digest of the file is computed from these, so the file need not be read again. The hash function is XXH3, which
is as fast as reading the data from memory. BLAKE3 would take 5% of the processing time of a row. The digest does not
protect against deliberate changes, because an attacker could replace the digest, too.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from mindie_mm.errors import LimitExceeded, SegmentMissing, os_errors_as
from mindie_mm.shm.format.layout import DISK_PAGE, OFFSET, PUBLISHED, SIZE, STATE, WORDS_PER_ENTRY, ArenaHeader

WRITE_BATCH_BYTES = 16 * 2**20
"""Size of a batch's memory in bytes. Two batches are used alternately. A larger block gets its own batch."""


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
    """Blocks that are contiguous both in memory and in the file. Each block has whole pages."""

    __slots__ = ("blocks", "memory", "num_filling", "offset", "used_bytes")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.memory = memory
        self.offset = offset
        """Offset of the batch in the file, in bytes."""
        self.used_bytes = 0
        self.num_filling = 0
        """Number of blocks that are still being filled."""
        self.blocks: dict[int, slice] = {}
        """Location of each published block in `memory`, by table entry."""

    @property
    def room_bytes(self) -> int:
        """Number of bytes that are free for more blocks."""
        return len(self.memory) - self.used_bytes

    def cut(self, used_bytes: int) -> None:
        """Remove the blocks after the first `used_bytes` bytes."""
        self.used_bytes = max(0, min(self.used_bytes, used_bytes))
        self.blocks = {entry: place for entry, place in self.blocks.items() if place.start < self.used_bytes}


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
        self.digests: dict[int, bytes] = {}
        """XXH3-128 digests of the written blocks, by table entry. The background thread computes them."""
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # some network file systems have no O_DIRECT
            self._direct = -1

    def batch(self, nbytes: int, offset: int) -> WriteBatch:
        """Return an empty batch at file offset `offset` with room for a block of `nbytes`.

        Raises:
            LimitExceeded: There is not enough memory.

        """
        return WriteBatch(self._memory.allocate(nbytes), offset)

    def write(self, batch: WriteBatch) -> None:
        """Start writing a batch in the background. The caller must not use the batch after this call.

        If the batch is a single large block, wait until it is written, so that only one large block is in memory.

        Raises:
            OSError: This write or an earlier one failed.

        """
        self.wait()
        self._writing = self._thread.submit(self._write, batch)
        if len(batch.memory) > WRITE_BATCH_BYTES:
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

    def _write(self, batch: WriteBatch) -> None:
        data = memoryview(batch.memory)[: batch.used_bytes]
        if self._direct < 0 or not self._write_direct(data, batch.offset):
            write_all(self._descriptor, data, batch.offset)
        self.digests |= {entry: xxh3_128_digest(data[place]) for entry, place in batch.blocks.items()}
        self._memory.free(batch.memory)

    def _write_direct(self, data: memoryview, offset: int) -> bool:
        """Write without the page cache. Return False if the logical blocks of the disk are larger than a page."""
        try:
            write_all(self._direct, data, offset)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at the file offset `offset`. Raise OSError if a write fails."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk. Do nothing if its file system does not support this.

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


def combined(head: bytes, blocks: Iterable[bytes]) -> str:
    """Return the digest of a file in hexadecimal.

    It is the XXH3-128 of the concatenation of the head of the file and the digests of its blocks.

    Args:
        head: All bytes of the file before the first block.
        blocks: XXH3-128 digests of the published blocks, in file order.

    """
    return xxh3_128_hexdigest(head + b"".join(blocks))


def digest_of(path: Path) -> str:
    """Compute the digest of a file from its contents. If the file is intact, the digest equals `DiskArena.digest`.

    Raises:
        SegmentMissing: The file is not a complete file of blocks, or is damaged.
        OSError: The file cannot be read.

    """
    with path.open("rb") as file:
        header = ArenaHeader.read(file.fileno(), os.fstat(file.fileno()), DISK_PAGE)
        with mmap.mmap(file.fileno(), header.file_bytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as data:
            with data[DISK_PAGE : header.releases_offset].cast("Q") as entries:
                blocks = []
                for at in range(0, len(entries), WORDS_PER_ENTRY):
                    offset, size = entries[at + OFFSET], entries[at + SIZE]
                    if offset + size > header.file_bytes:
                        raise SegmentMissing(f"block {at // WORDS_PER_ENTRY} is outside the file")
                    if entries[at + STATE] & 0xFF == PUBLISHED:
                        with data[offset : offset + size] as block:
                            blocks.append(xxh3_128_digest(block))
            return combined(data[: header.data_offset].tobytes(), blocks)
