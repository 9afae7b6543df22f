"""A file of blocks on disk: written once, block after block, then mounted and read like an arena.

Blocks are filled in memory, and written when there is a batch of them. To fill one in the file's own pages costs two to
four times as much: the file system makes each of them, fills it with zeros and notes that it is written to.
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
from mindie_mm.shm.disk.disk_digest import combined
from mindie_mm.shm.disk.disk_writer import (
    WRITE_BATCH_BYTES,
    DiskWriter,
    WriteBatch,
    WriteBatchMemory,
    sync_folder,
    write_all,
)
from mindie_mm.shm.format.block_header import BlockPlan, check_digest
from mindie_mm.shm.format.extent import Extent
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
    Owner,
    round_up,
    state_word,
)
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.words import MAX_ARENA, MAX_BLOCK
from mindie_mm.shm.memory.block import Block
from mindie_mm.shm.memory.liveness_lock import LivenessLock, is_same

GENERATION = 1
"""Every block's: no entry of the table is used twice."""

_UNFINISHED = ".partial"


class DiskArena:
    """The writer's side: a context manager, and safe to use from many threads.

    Blocks are allocated and published as in an `Arena`, and never freed. The file has its name once it is closed,
    complete and synced; leaving it by an error leaves none. The same blocks in the same order make the same bytes.
    """

    def __init__(self, path: Path, header: ArenaHeader, lock: LivenessLock, memory: WriteBatchMemory) -> None:
        """For `create`."""
        self.path = path
        self.number = header.arena
        """What the words carry as the arena."""
        self.capacity_bytes = header.capacity_bytes
        """Most bytes for blocks, in whole pages; the file ends with its last block."""
        self._header = header
        self._lock = lock
        self._entries = array("Q", bytes(header.releases_offset - DISK_PAGE))
        self._offsets: list[int] = []  # of the blocks themselves none is kept: they hold what they were filled in
        self._writer = DiskWriter(_unfinished(path), lock.descriptor, memory)
        self._batch: WriteBatch | None = None  # that takes the next block
        self.digest = ""
        """Once it is closed: `combined`, of the pages before the blocks and each block's digest."""
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
        """Begins the file that will be `path`; what an earlier writer left unfinished there is written anew.

        `number`, 0 to 65,535, is the caller's choice: what the words carry, and what is mounted once at a time.
        `num_entries` is the most blocks, 1 to 16,384; None: as many as an arena of the capacity has. Neither these
        nor the capacity take room before they are used, but for 72 bytes an entry. `memory` is shared by files that
        are written one after another.

        InputError for a number or a capacity that no file can have, SharedMemoryError if the file cannot be made or
        another process writes it.
        """
        if not 0 <= number <= MAX_ARENA:
            raise InputError(f"number {number} of a file of blocks is not 0 to {MAX_ARENA}")
        if capacity_bytes < 1:
            raise InputError(f"a file of {capacity_bytes} bytes of blocks; it takes at least 1")
        if num_entries is not None and not 1 <= num_entries <= MAX_BLOCK + 1:
            raise InputError(f"a file of {num_entries} blocks; it takes 1 to {MAX_BLOCK + 1}")
        header = replace(ArenaHeader.plan(capacity_bytes, 0, Owner.nobody(), DISK_PAGE), arena=number)
        header = header if num_entries is None else replace(header, num_entries=num_entries)
        path = absolute(path)
        unfinished = _unfinished(path)
        lock = _locked(unfinished)
        try:
            _make_room(lock.descriptor, unfinished, header.file_bytes)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            lock.release()
            raise
        return cls(path, header, lock, memory or WriteBatchMemory())

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks, in whole pages."""
        return self._end - self._header.data_offset

    @property
    def num_blocks(self) -> int:
        """Blocks being filled or published."""
        return len(self._offsets)

    @property
    def num_free(self) -> int:
        """Blocks that the file may still have."""
        return self._header.num_entries - len(self._offsets)

    def allocate(self, specs: Mapping[str, ArraySpec], *, path_file: None = None) -> Block:
        """A block with these arrays, uninitialised. A block on disk outlives its request: no path file records it.

        ArenaFull if the file is full, or the disk was for what was published before; LimitExceeded for what no file
        of this capacity, or no word, holds.
        """
        plan = BlockPlan.of(specs, b"")
        nbytes = round_up(plan.size, DISK_PAGE)
        with self._mutex:
            self._require_open()
            entry, offset = len(self._offsets), self._end
            if nbytes > self.capacity_bytes:
                raise LimitExceeded(f"a block of {nbytes} bytes; {self.path} takes {self.capacity_bytes}")
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
        """For `Block.publish`: the block is written once its batch is full. ArenaFull if the disk is, or was before."""
        if digest is not None:
            check_digest(digest)
        with self._mutex:
            self._require_open()
            if not self._fills(block):
                raise SharedMemoryError(f"{block.ref}: the block was left, it cannot be published")
            block.write_header(digest or b"")
            data = self._memory(block)
            for start, stop in block.plan.gaps(block.nbytes):  # nothing of an earlier block is written
                data[start:stop] = bytes(stop - start)
            _, batch = self._filling[block.entry]
            start = block.pieces[0].offset - batch.offset
            batch.blocks[block.entry] = slice(start, start + block.nbytes)
            self._entries[WORDS_PER_ENTRY * block.entry + STATE] = state_word(GENERATION, PUBLISHED)
            with self._writing():
                self._end_filling(block)

    def roll_back(self, num_blocks: int) -> None:
        """As if only the first `num_blocks` blocks had ever been: nobody has a reference to the others.

        InputError while one of them is being filled.
        """
        with self._mutex:
            self._require_open()
            if any(entry >= num_blocks for entry in self._filling):
                raise InputError(f"{self.path}: blocks {sorted(self._filling)} are still being filled")
            dropped = self._offsets[num_blocks:]
            if not dropped:
                return
            self._cut(dropped[0])
            del self._offsets[num_blocks:]
            words = slice(WORDS_PER_ENTRY * num_blocks, WORDS_PER_ENTRY * (num_blocks + len(dropped)))
            self._entries[words] = array("Q", bytes(8 * (words.stop - words.start)))

    def discard(self, block: Block) -> None:
        """For `Block`: as if it had never been, if it is the last one; else its place stays empty."""
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
            with suppress(OSError):  # the next one to write is told
                self._end_filling(block)

    def flush(self) -> None:
        """Begins to write what was published, for a `close` that waits less. ArenaFull if the disk is full."""
        with self._mutex:
            self._require_open()
            with self._writing():
                self._write_batch()

    def close(self) -> None:
        """Gives the file its name, complete and synced. Idempotent.

        InputError while a block is being filled, SharedMemoryError if the disk fails or is full: then nothing is left.
        """
        with self._mutex:
            if not self._lock.held:  # closed, or a forked child's
                return
            if self._filling:
                raise InputError(f"{self.path}: blocks {sorted(self._filling)} are still being filled")
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
                self._let_go()

    def abandon(self) -> None:
        """Removes what was written. Nothing after `close`."""
        with self._mutex:
            if self._lock.held:
                with suppress(FileNotFoundError):
                    _unfinished(self.path).unlink()
                self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()  # also what `close` refused to finish

    def _published(self) -> Iterator[int]:
        """Entries of the blocks that readers will find."""
        return (n for n in range(self.num_blocks) if self._entries[WORDS_PER_ENTRY * n + STATE] & 0xFF == PUBLISHED)

    def _require_open(self) -> None:
        if not self._lock.held:
            raise SharedMemoryError(f"{self.path} is closed, or another process's")

    def _fills(self, block: Block) -> bool:
        return block.entry in self._filling and self._filling[block.entry][0] is block

    def _memory(self, block: Block) -> memoryview:
        """The memory in which a block is filled."""
        _, batch = self._filling[block.entry]
        ((offset, nbytes),) = block.pieces
        return memoryview(batch.memory)[offset - batch.offset :][:nbytes]

    def _writing(self) -> AbstractContextManager[None]:
        return os_errors_as(ArenaFull, f"{self.path} cannot be written")

    def _batch_for(self, nbytes: int) -> WriteBatch:
        """The batch that has room for the next block: the last one, or a new one. OSError, LimitExceeded."""
        if self._batch is None or self._batch.room_bytes < nbytes:
            self._write_batch()
            self._batch = self._writer.batch(nbytes, self._end)
        return self._batch

    def _write_batch(self) -> None:
        """Ends the batch that takes blocks; it is written when none of its blocks is being filled. OSError."""
        batch, self._batch = self._batch, None
        if batch is not None and not batch.num_filling:
            self._writer.write(batch)

    def _end_filling(self, block: Block) -> None:
        """OSError."""
        _, batch = self._filling.pop(block.entry)
        batch.num_filling -= 1
        if batch is not self._batch and not batch.num_filling:
            self._writer.write(batch)
        elif batch is self._batch and len(batch.memory) > WRITE_BATCH_BYTES:  # written at once: it is large
            self._write_batch()

    def _cut(self, end: int) -> None:
        """The next block begins at `end`; what was written behind it is written over, or cut off."""
        self._end = end
        for batch in filter(None, [self._batch, *(batch for _, batch in self._filling.values())]):
            batch.cut(end - batch.offset)
        if self._batch is not None and self._batch.offset > end:
            self._batch = None

    def _let_go(self) -> None:
        self._writer.close()
        self._batch = None
        self._lock.release()


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + _UNFINISHED)


def _locked(unfinished: Path) -> LivenessLock:
    """The lock of that file, which is made if there is none. SharedMemoryError if another process writes it."""
    with os_errors_as(SharedMemoryError, f"{unfinished} cannot be made"):
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        lock = LivenessLock(descriptor, needed=False)  # the run has its own lock, and warns if locks are missing
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise SharedMemoryError(f"{unfinished} is being written by another process") from None
        raise SharedMemoryError(f"{unfinished} cannot be locked: {error.strerror}") from error
    if not is_same(unfinished, descriptor):
        lock.release()
        raise SharedMemoryError(f"{unfinished} was just finished by another process")
    return lock


def _make_room(descriptor: int, path: Path, file_bytes: int) -> None:
    """An empty file of that length, none of it on the disk yet."""
    with os_errors_as(SharedMemoryError, f"{path} cannot have {file_bytes} bytes"):
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, file_bytes)
