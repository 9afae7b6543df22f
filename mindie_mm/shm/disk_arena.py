"""Writer of a file of blocks on disk. The file is written once, and can then be mounted and read like an arena.

Callers fill blocks in private memory, and the writer writes them to the file in batches. Filling blocks in a mapping of
the file would take two to four times as long, because the file system allocates, clears and tracks each page.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Self

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SharedMemoryError, os_errors_as
from mindie_mm.settings.paths import absolute
from mindie_mm.shm.disk_writer import (
    WRITE_BATCH_BYTES,
    DiskWriter,
    WriteBatch,
    WriteBatchMemory,
    combined,
    sync_folder,
    write_all,
)
from mindie_mm.shm.format.block import Block, BlockPlan, check_digest
from mindie_mm.shm.format.layout import (
    DISK_PAGE,
    FILLING,
    FREE,
    OFFSET,
    PUBLISHED,
    SIZE,
    STATE,
    WORDS_PER_ENTRY,
    ArenaHeader,
    Extent,
    Owner,
    round_up,
    state_word,
)
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.words import MAX_ARENA, MAX_BLOCK
from mindie_mm.shm.liveness_lock import LivenessLock, is_same

GENERATION = 1
"""Generation of every block. It never changes, because table entries are not reused."""

_UNFINISHED = ".partial"


class DiskArena:
    """Writer of a file of blocks on disk. It is a context manager and thread-safe.

    Blocks are allocated and published as in an `Arena`, but never freed. `close` syncs the complete file to disk and
    renames it to `path`. If the context exits with an error, no file remains. Equal blocks in the same order produce
    equal files.
    """

    def __init__(self, path: Path, header: ArenaHeader, lock: LivenessLock, memory: WriteBatchMemory) -> None:
        """Take ownership of a new, locked file. Callers use `create` instead."""
        self.path = path
        self.number = header.arena
        """Arena number in the name words of the blocks."""
        self.capacity_bytes = header.capacity_bytes
        """Maximum total size of the blocks in bytes, a multiple of the page size. The finished file may be smaller."""
        self._header = header
        self._lock = lock
        self._entries = array("Q", bytes(header.releases_offset - DISK_PAGE))
        self._offsets: list[int] = []  # not a list of blocks, because blocks keep the memory of their batch alive
        self._writer = DiskWriter(_unfinished(path), lock.descriptor, memory)
        self._batch: WriteBatch | None = None  # the batch for the next block
        self.digest = ""
        """Digest of the file, computed by `combined`. Empty before `close`."""
        self._filling: dict[int, tuple[Block, WriteBatch]] = {}
        self._end = header.data_offset
        self._mutex = Lock()

    @classmethod
    def create(
        cls,
        path: Path,
        number: int,
        capacity_bytes: int,
        num_entries: int | None = None,
        memory: WriteBatchMemory | None = None,
    ) -> Self:
        """Start to write a file. If an earlier writer left an unfinished file, it is overwritten.

        Only the blocks, and 72 bytes for each entry of the table, take space on the disk.

        Args:
            path: Path of the finished file.
            number: Arena number in the name words of the blocks, 0 to 65,535. A process can mount only one file with a
                given number at a time.
            capacity_bytes: Maximum total size of the blocks in bytes, at least 1. It is rounded up to whole pages.
            num_entries: Maximum number of blocks, 1 to 16,384. None means the same number as in an arena of this
                capacity.
            memory: Pool of batch memory. Pass the same pool for files that are written one after another.

        Raises:
            InputError: The number, the capacity or the number of entries is out of range.
            SharedMemoryError: The file cannot be created, or another process is writing to it.

        """
        if not 0 <= number <= MAX_ARENA:
            raise InputError(f"the number of a file of blocks is {number}; it must be from 0 to {MAX_ARENA}")
        if capacity_bytes < 1:
            raise InputError(f"the capacity of a file of blocks is {capacity_bytes} bytes; it must be at least 1")
        if num_entries is not None and not 1 <= num_entries <= MAX_BLOCK + 1:
            raise InputError(
                f"the number of entries of a file of blocks is {num_entries}; it must be from 1 to {MAX_BLOCK + 1}"
            )
        header = replace(ArenaHeader.plan(capacity_bytes, 0, Owner.nobody(), DISK_PAGE), arena=number)
        header = header if num_entries is None else replace(header, num_entries=num_entries)
        path = absolute(path)
        unfinished = _unfinished(path)
        lock = _locked(unfinished)
        try:
            _make_room(lock.descriptor, unfinished, header.file_bytes)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            lock.close()
            raise
        return cls(path, header, lock, memory or WriteBatchMemory())

    @property
    def used_bytes(self) -> int:
        """Total size of the blocks in bytes, a multiple of the page size."""
        return self._end - self._header.data_offset

    @property
    def num_blocks(self) -> int:
        """Number of allocated blocks, including discarded blocks whose entries stay empty."""
        return len(self._offsets)

    @property
    def num_free(self) -> int:
        """Number of blocks that can still be allocated."""
        return self._header.num_entries - len(self._offsets)

    def allocate(self, specs: Mapping[str, ArraySpec], *, path_file: None = None) -> Block:
        """Allocate a block with uninitialized arrays.

        No path file records the block, because a block on disk outlives its request.

        Args:
            specs: Arrays by name, 1 to 64.
            path_file: Always None. The argument exists for compatibility with `Arena.allocate`.

        Raises:
            ArenaFull: The file is full, or the disk was full when an earlier batch was written.
            LimitExceeded: The block exceeds the file's capacity, the wire format's limits or the available memory.
            SharedMemoryError: The file is closed.

        """
        plan = BlockPlan.of(specs, b"")
        nbytes = round_up(plan.size, DISK_PAGE)
        with self._mutex:
            self._require_open()
            entry, offset = len(self._offsets), self._end
            if nbytes > self.capacity_bytes:
                raise LimitExceeded(
                    f"the block has {nbytes} bytes; the limit is {self.capacity_bytes}, the capacity of {self.path}"
                )
            if offset + nbytes > self._header.file_bytes or entry == self._header.num_entries:
                raise ArenaFull(
                    f"no room in {self.path} for a block of {nbytes} bytes: {self.used_bytes} of {self.capacity_bytes} "
                    f"bytes and {entry} of {self._header.num_entries} entries are used"
                )
            with self._writing():
                batch = self._batch_for(nbytes)
            pieces = (Extent(offset, nbytes),)
            block = Block(self, plan, b"", entry, GENERATION, pieces, nbytes, batch.memory, batch.used_bytes)
            batch.used_bytes += nbytes
            batch.num_filling += 1
            self._filling[entry] = block, batch
            self._offsets.append(offset)
            self._end += nbytes
            at = WORDS_PER_ENTRY * entry
            self._entries[at + STATE] = state_word(GENERATION, FILLING)
            self._entries[at + OFFSET], self._entries[at + SIZE] = offset, nbytes
        return block

    def publish(self, block: Block, digest: bytes | None) -> None:
        """Publish a block on behalf of `Block.publish`. The block is written to the file when its batch is full.

        Raises:
            ArenaFull: This write or an earlier one failed, for example because the disk is full.
            LimitExceeded: The digest is too short or too long.
            SharedMemoryError: The file is closed, or the block is no longer being filled.

        """
        if digest is not None:
            check_digest(digest)
        with self._mutex:
            self._require_open()
            if not self._fills(block):
                raise SharedMemoryError(f"{block.ref}: the block cannot be published after its context has ended")
            block.write_header(digest or b"")
            data = self._memory(block)
            for start, stop in block.plan.gaps(block.nbytes):  # clear the data of an earlier block in reused memory
                data[start:stop] = bytes(stop - start)
            _, batch = self._filling[block.entry]
            start = block.pieces[0].offset - batch.offset
            batch.blocks[block.entry] = slice(start, start + block.nbytes)
            self._entries[WORDS_PER_ENTRY * block.entry + STATE] = state_word(GENERATION, PUBLISHED)
            with self._writing():
                self._end_filling(block)

    def roll_back(self, num_blocks: int) -> None:
        """Remove all blocks after the first `num_blocks`. No reference to the removed blocks may be in use.

        Raises:
            InputError: A block to remove is still being filled.
            SharedMemoryError: The file is closed.

        """
        with self._mutex:
            self._require_open()
            if any(entry >= num_blocks for entry in self._filling):
                raise InputError(
                    f"{self.path}: blocks {sorted(self._filling)} are still being filled and cannot be removed"
                )
            dropped = self._offsets[num_blocks:]
            if not dropped:
                return
            self._cut(dropped[0])
            del self._offsets[num_blocks:]
            words = slice(WORDS_PER_ENTRY * num_blocks, WORDS_PER_ENTRY * (num_blocks + len(dropped)))
            self._entries[words] = array("Q", bytes(8 * (words.stop - words.start)))

    def discard(self, block: Block) -> None:
        """Discard a block on behalf of `Block`.

        If it is the last block, the next block reuses its space. Otherwise its space stays empty.
        """
        with self._mutex:
            if not self._lock.held:
                return
            if not self._fills(block):
                return
            at = WORDS_PER_ENTRY * block.entry
            if block.entry == len(self._offsets) - 1:
                self._entries[at + STATE] = self._entries[at + OFFSET] = self._entries[at + SIZE] = 0
                self._cut(self._offsets.pop())
            else:
                self._entries[at + STATE] = state_word(GENERATION, FREE)
                self._memory(block)[:] = bytes(block.nbytes)
            with suppress(OSError):  # the next write raises the error again
                self._end_filling(block)

    def flush(self) -> None:
        """Start to write the published blocks in the background, so that a later `close` takes less time.

        Raises:
            ArenaFull: This write or an earlier one failed, for example because the disk is full.
            SharedMemoryError: The file is closed.

        """
        with self._mutex:
            self._require_open()
            with self._writing():
                self._write_batch()

    def close(self) -> None:
        """Finish the file, sync it to disk and rename it to `path`. Idempotent.

        Raises:
            InputError: A block is still being filled.
            SharedMemoryError: The disk is full, or a write fails. The unfinished file has been removed.

        """
        with self._mutex:
            if not self._lock.held:  # already closed, or this is a forked child
                return
            if self._filling:
                raise InputError(
                    f"{self.path} cannot be finished: blocks {sorted(self._filling)} are still being filled. Publish "
                    "or discard these blocks first"
                )
            header = replace(self._header, capacity_bytes=self.used_bytes)
            try:
                self._write_batch()
                self._writer.wait()
                head = header.pack().ljust(DISK_PAGE, b"\0") + self._entries.tobytes() + bytes(header.releases_bytes)
                write_all(self._lock.descriptor, memoryview(head), 0)
                os.ftruncate(self._lock.descriptor, self._end)
                os.fsync(self._lock.descriptor)
                _unfinished(self.path).rename(self.path)
                sync_folder(self.path.parent)
                self.digest = combined(head, map(self._writer.digests.__getitem__, self._published()))
            except OSError as error:
                _unfinished(self.path).unlink(missing_ok=True)
                raise SharedMemoryError(f"{self.path} cannot be finished: {error.strerror}") from error
            finally:
                self._close_writer()

    def abandon(self) -> None:
        """Remove the unfinished file. Do nothing after `close`."""
        with self._mutex:
            if self._lock.held:
                with suppress(FileNotFoundError):
                    _unfinished(self.path).unlink()
                self._close_writer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()  # also if `close` raised

    def _published(self) -> Iterator[int]:
        return (n for n in range(self.num_blocks) if self._entries[WORDS_PER_ENTRY * n + STATE] & 0xFF == PUBLISHED)

    def _require_open(self) -> None:
        if not self._lock.held:
            raise SharedMemoryError(f"{self.path} is closed or belongs to another process")

    def _fills(self, block: Block) -> bool:
        return block.entry in self._filling and self._filling[block.entry][0] is block

    def _memory(self, block: Block) -> memoryview:
        """Return the memory in which the block is filled."""
        _, batch = self._filling[block.entry]
        ((offset, nbytes),) = block.pieces
        return memoryview(batch.memory)[offset - batch.offset :][:nbytes]

    def _writing(self) -> AbstractContextManager[None]:
        return os_errors_as(ArenaFull, f"{self.path} cannot be written")

    def _batch_for(self, nbytes: int) -> WriteBatch:
        """Return a batch with room for the next block.

        Raises:
            LimitExceeded: There is not enough memory for a new batch.
            OSError: A write has failed.

        """
        if self._batch is None or self._batch.room_bytes < nbytes:
            self._write_batch()
            self._batch = self._writer.batch(nbytes, self._end)
        return self._batch

    def _write_batch(self) -> None:
        """End the current batch, and start to write it unless one of its blocks is still being filled.

        Raises:
            OSError: A write has failed.

        """
        batch, self._batch = self._batch, None
        if batch is not None and not batch.num_filling:
            self._writer.write(batch)

    def _end_filling(self, block: Block) -> None:
        """Mark the block as filled. Write the batch if all its blocks are filled. Raise OSError if writing failed."""
        _, batch = self._filling.pop(block.entry)
        batch.num_filling -= 1
        if batch is not self._batch and not batch.num_filling:
            self._writer.write(batch)
        elif batch is self._batch and len(batch.memory) > WRITE_BATCH_BYTES:  # do not keep a large block in memory
            self._write_batch()

    def _cut(self, end: int) -> None:
        """Start the next block at offset `end`. Bytes after `end` are overwritten by later blocks or cut by `close`."""
        self._end = end
        for batch in filter(None, [self._batch, *(batch for _, batch in self._filling.values())]):
            batch.cut(end - batch.offset)
        if self._batch is not None and self._batch.offset > end:
            self._batch = None

    def _close_writer(self) -> None:
        self._writer.close()
        self._batch = None
        self._lock.close()


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + _UNFINISHED)


def _locked(unfinished: Path) -> LivenessLock:
    """Open or create the unfinished file and lock it. Raise SharedMemoryError if another process is writing to it."""
    with os_errors_as(SharedMemoryError, f"{unfinished} cannot be created"):
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        lock = LivenessLock(descriptor, needed=False)  # a batch run locks its folder itself, and warns if it cannot
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise SharedMemoryError(f"{unfinished} is being written by another process") from None
        raise SharedMemoryError(f"{unfinished} cannot be locked: {error.strerror}") from error
    if not is_same(unfinished, descriptor):
        lock.close()
        raise SharedMemoryError(f"{unfinished} was just finished by another process")
    return lock


def _make_room(descriptor: int, path: Path, file_bytes: int) -> None:
    """Empty the file and extend it to `file_bytes` without allocating disk space."""
    with os_errors_as(SharedMemoryError, f"{path} cannot be extended to {file_bytes} bytes"):
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, file_bytes)
