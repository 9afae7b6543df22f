"""The file of an arena: complete, reserved whole and locked before it has a name, and how it goes."""

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
from mindie_mm.shm.format.extent import Pieces
from mindie_mm.shm.format.layout import SHM_DIRECTORY, ArenaHeader, Owner, file_name
from mindie_mm.shm.format.stats import POPULATED, STATS_BYTES, STATS_OFFSET
from mindie_mm.shm.format.words import MAX_ARENA
from mindie_mm.shm.memory.anonymous_file import give_name, make_anonymous, reopened, reserve
from mindie_mm.shm.memory.liveness_lock import LivenessLock, unlink_same
from mindie_mm.shm.memory.populate import MADV_POPULATE_WRITE, Populator
from mindie_mm.shm.memory.scatter import map_pieces

# How often the owner looks whether its file still has its name.
_LOOK_NS = 1_000_000


class ArenaFile:
    """Mapped, and its process's own: a forked child holds nothing of it, and leaves it alone.

    What nobody closes is removed when it is dropped, or when the process ends well.
    """

    def __init__(self, header: ArenaHeader, lock: LivenessLock, mapping: mmap.mmap) -> None:
        """For `create`."""
        self.header = header
        self.path = SHM_DIRECTORY / file_name(header.arena)
        self.mapping: mmap.mmap | None = mapping
        """All of it; None once it is closed."""
        self.stats = memoryview(mapping)[STATS_OFFSET : STATS_OFFSET + STATS_BYTES].cast("Q")
        """What the owner counts; places as in stats.py."""
        self._lock = lock
        self._packed, self._file_bytes = header.pack(), header.file_bytes
        self._seen_ns = 0
        self._populator = Populator(MADV_POPULATE_WRITE, partial(self.stats.__setitem__, POPULATED))
        # Not weakref's: a child that multiprocessing forks, such as a DataLoader's worker, leaves by os._exit.
        self._finalizer = Finalize(self, _remove, (self.path, lock, self._populator), exitpriority=0)
        self._populator.start(mapping)

    @classmethod
    def create(cls, capacity_bytes: int) -> ArenaFile:
        """A new one of this process, with room for that many bytes in blocks. InputError, SharedMemoryError."""
        if type(capacity_bytes) is not int or capacity_bytes < 1:
            raise InputError(f"an arena of {capacity_bytes!r} bytes; it takes a whole number of at least 1")
        header = ArenaHeader.plan(capacity_bytes, time.time_ns(), Owner.current())
        # Lock first. Reserving takes long, and a child that another thread forks meanwhile must close the descriptor.
        with os_errors_as(SharedMemoryError, f"cannot lock a file in {SHM_DIRECTORY}"):
            lock = LivenessLock(make_anonymous())
        try:
            reserve(lock.descriptor, header.file_bytes, "the arena")
            mapping = _map(lock.descriptor, header.file_bytes)
            header = _link(lock.descriptor, header)
        except BaseException:
            lock.release()
            raise
        return cls(header, lock, mapping)

    @property
    def populated(self) -> Event:
        """Set once every page is faulted in, which goes on in the background, or it is closed."""
        return self._populator.done

    @property
    def held(self) -> bool:
        """False once it is closed, and in a forked child."""
        return self._lock.held

    @property
    def lost(self) -> bool:
        """Whether it is not held, or another program removed, cut or overwrote it: readers find nothing there.

        Writing where it was cut would end this process.
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
        """SharedMemoryError unless it is."""
        if not self._lock.held:
            raise SharedMemoryError(f"arena {self.path} is closed, or another process's")

    def require_found(self, now_ns: int) -> None:
        """SharedMemoryError unless it is held and not `lost`, where that was not looked at in the last millisecond."""
        if now_ns - self._seen_ns > _LOOK_NS or not self._lock.held:
            self.require_held()
            if self.lost:
                raise SharedMemoryError(f"arena {self.path} was removed, cut or overwritten by others; make a new one")
            self._seen_ns = now_ns

    def map(self, pieces: Pieces) -> memoryview:
        """One behind another, to write to. SharedMemoryError if they cannot be mapped."""
        descriptor = reopened(self._lock.descriptor)
        try:
            return map_pieces(descriptor, pieces, writable=True)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Removes it: whoever maps it keeps the pages. Idempotent; a forked child only lets go."""
        self._populator.stop()
        self._populator.join()  # which maps it: else there may be no room for another one at once
        _remove(self.path, self._lock, self._populator)
        self._finalizer.cancel()
        self.mapping = None
        self.stats = memoryview(b"")


def _remove(path: Path, lock: LivenessLock, populator: Populator) -> None:
    """Idempotent, and nothing to the file in a forked child."""
    populator.stop()
    if lock.held:
        unlink_same(path, lock.descriptor)
    lock.release()


def _map(descriptor: int, file_bytes: int) -> mmap.mmap:
    second = reopened(descriptor)
    try:
        return mmap.mmap(second, file_bytes)
    finally:
        os.close(second)


def _link(descriptor: int, header: ArenaHeader) -> ArenaHeader:
    """Gives the file its name; the number may come out another one than asked for."""
    with os_errors_as(SharedMemoryError, f"no arena can be named in {SHM_DIRECTORY}"):
        for _ in range(MAX_ARENA + 1):
            header = replace(header, arena=secrets.randbelow(MAX_ARENA + 1))
            os.pwrite(descriptor, header.pack(), 0)
            try:
                give_name(descriptor, file_name(header.arena))
            except FileExistsError:
                continue
            return header
    raise SharedMemoryError(f"no number of 0 to {MAX_ARENA} is free in {SHM_DIRECTORY}")
