"""The file of an arena. The file is complete, fully reserved and locked before it gets a name."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Event

from mindie_mm.errors import InputError, SharedMemoryError, os_errors_as
from mindie_mm.shm.dev_shm import give_name, make_anonymous, reopened, reserve
from mindie_mm.shm.format.layout import (
    POPULATED,
    SHM_DIRECTORY,
    STATS_BYTES,
    STATS_OFFSET,
    ArenaHeader,
    Owner,
    Pieces,
    file_name,
)
from mindie_mm.shm.format.words import MAX_ARENA
from mindie_mm.shm.liveness_lock import LivenessLock, unlink_same
from mindie_mm.shm.mapping import MADV_POPULATE_WRITE, Populator, map_pieces

# Minimum interval in nanoseconds between two checks that the file is still intact.
_LOOK_NS = 1_000_000


class ArenaFile:
    """Mapped file of an arena that this process owns. A forked child does not own it and never removes it.

    A file that is never closed is removed when the object is garbage-collected or when the process exits normally.
    """

    def __init__(self, header: ArenaHeader, lock: LivenessLock, mapping: mmap.mmap) -> None:
        """Take ownership of a locked file and its mapping. Callers use `create` instead."""
        self.header = header
        self.path = SHM_DIRECTORY / file_name(header.arena)
        self.mapping: mmap.mmap | None = mapping
        """Mapping of the whole file. None after `close`."""
        self.stats = memoryview(mapping)[STATS_OFFSET : STATS_OFFSET + STATS_BYTES].cast("Q")
        """Counters in the header page, as 8-byte words. `ArenaStats` defines the indices."""
        self._lock = lock
        self._packed, self._file_bytes = header.pack(), header.file_bytes
        self._seen_ns = 0
        self._populator = Populator(MADV_POPULATE_WRITE, partial(self.stats.__setitem__, POPULATED))
        # Children of multiprocessing, such as DataLoader workers, exit with os._exit, which skips weakref.finalize.
        self._finalizer = Finalize(self, _remove, (self.path, lock, self._populator), exitpriority=0)
        self._populator.start(mapping)

    @classmethod
    def create(cls, capacity_bytes: int) -> ArenaFile:
        """Create a file with room for `capacity_bytes` bytes of blocks.

        Raises:
            InputError: The capacity is not an integer of at least 1.
            SharedMemoryError: /dev/shm does not have enough space, or the file cannot be created.

        """
        if type(capacity_bytes) is not int or capacity_bytes < 1:
            raise InputError(f"the capacity of an arena is {capacity_bytes!r}; it must be an integer of at least 1")
        header = ArenaHeader.plan(capacity_bytes, time.time_ns(), Owner.current())
        # Lock the file first, because LivenessLock closes the descriptor in forked children. Another thread may fork
        # during `reserve`, which takes a long time.
        with os_errors_as(SharedMemoryError, f"cannot lock a file in {SHM_DIRECTORY}"):
            lock = LivenessLock(make_anonymous())
        try:
            reserve(lock.descriptor, header.file_bytes, "the arena")
            mapping = _map(lock.descriptor, header.file_bytes)
            header = _link(lock.descriptor, header)
        except BaseException:
            lock.close()
            raise
        return cls(header, lock, mapping)

    @property
    def populated(self) -> Event:
        """Event that is set when the background thread has faulted in every page, or when the file is closed."""
        return self._populator.done

    @property
    def held(self) -> bool:
        """True while this process owns the file. False after `close` and in a forked child."""
        return self._lock.held

    @property
    def lost(self) -> bool:
        """True if this process does not own the file, or if another program removed, truncated or overwrote it.

        Readers find no blocks in such a file. A write beyond its truncated end raises SIGBUS.
        """
        if self.mapping is None or not self._lock.held:
            return True
        status = os.fstat(self._lock.descriptor)
        return (
            status.st_nlink == 0
            or status.st_size != self._file_bytes
            or self.mapping[: len(self._packed)] != self._packed
        )

    def require_held(self) -> None:
        """Raise SharedMemoryError unless this process owns the file."""
        if not self._lock.held:
            raise SharedMemoryError(f"arena {self.path} is closed or belongs to another process")

    def require_found(self) -> None:
        """Raise SharedMemoryError if this process does not own the file, or if the file is `lost`.

        `lost` is checked at most once per millisecond.
        """
        now_ns = time.monotonic_ns()
        if now_ns - self._seen_ns > _LOOK_NS or not self._lock.held:
            self.require_held()
            if self.lost:
                raise SharedMemoryError(
                    f"arena {self.path} was removed, truncated or overwritten by another process; create a new arena"
                )
            self._seen_ns = now_ns

    def map(self, pieces: Pieces) -> memoryview:
        """Map the pieces contiguously for writing. Raise SharedMemoryError if the kernel refuses."""
        descriptor = reopened(self._lock.descriptor)
        try:
            return map_pieces(descriptor, pieces, writable=True)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the file, except in a forked child. Idempotent.

        Processes that have mapped the file can still read their mappings.
        """
        self._populator.stop()
        # The thread keeps the mapping, and thus the pages, alive. Without this wait, a new arena might find no room.
        self._populator.join()
        _remove(self.path, self._lock, self._populator)
        self._finalizer.cancel()
        self.mapping = None
        self.stats = memoryview(b"")


def _remove(path: Path, lock: LivenessLock, populator: Populator) -> None:
    """Remove the file, except in a forked child. Idempotent."""
    populator.stop()
    if lock.held:
        unlink_same(path, lock.descriptor)
    lock.close()


def _map(descriptor: int, file_bytes: int) -> mmap.mmap:
    second = reopened(descriptor)
    try:
        return mmap.mmap(second, file_bytes)
    finally:
        os.close(second)


def _link(descriptor: int, header: ArenaHeader) -> ArenaHeader:
    """Link the file under a random free number and return the header with that number."""
    with os_errors_as(SharedMemoryError, f"no arena can be created in {SHM_DIRECTORY}"):
        for _ in range(MAX_ARENA + 1):
            header = replace(header, arena=secrets.randbelow(MAX_ARENA + 1))
            os.pwrite(descriptor, header.pack(), 0)
            try:
                give_name(descriptor, file_name(header.arena))
            except FileExistsError:
                continue
            return header
    raise SharedMemoryError(f"all arena numbers from 0 to {MAX_ARENA} are in use in {SHM_DIRECTORY}")
