"""How an arena's file comes to be: complete, reserved whole and locked before it has a name."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from dataclasses import replace

from mindie_mm.errors import InputError, SharedMemoryError
from mindie_mm.shm.layout import SHM_DIRECTORY, ArenaHeader, Owner, file_name
from mindie_mm.shm.life import LifeLock
from mindie_mm.shm.nameless import give_name, make_nameless, reopened, reserve
from mindie_mm.shm.words import MAX_ARENA


def create_file(capacity_bytes: int) -> tuple[ArenaHeader, LifeLock, mmap.mmap]:
    """A new arena file of this process: its header, its lock, and all of it mapped. InputError, SharedMemoryError."""
    if type(capacity_bytes) is not int or capacity_bytes < 1:
        raise InputError(f"an arena of {capacity_bytes!r} bytes; it takes a whole number of at least 1")
    header = ArenaHeader.plan(capacity_bytes, time.time_ns(), Owner.current())
    # Locked first: to reserve it takes long, and a child that another thread forks meanwhile is to close it.
    lock = LifeLock(make_nameless())
    try:
        reserve(lock.descriptor, header.file_bytes, "the arena")
        mapping = _map(lock.descriptor, header.file_bytes)
        return _link(lock.descriptor, header), lock, mapping
    except BaseException:
        lock.release()
        raise


def _map(descriptor: int, file_bytes: int) -> mmap.mmap:
    second = reopened(descriptor)
    try:
        return mmap.mmap(second, file_bytes)
    finally:
        os.close(second)


def _link(descriptor: int, header: ArenaHeader) -> ArenaHeader:
    """Gives the file its name; the number may come out another one than asked for."""
    try:
        for _ in range(MAX_ARENA + 1):
            header = replace(header, arena=secrets.randbelow(MAX_ARENA + 1))
            os.pwrite(descriptor, header.pack(), 0)
            try:
                give_name(descriptor, file_name(header.arena))
            except FileExistsError:
                continue
            return header
    except OSError as error:
        raise SharedMemoryError(f"no arena can be named in {SHM_DIRECTORY}: {error.strerror}") from error
    raise SharedMemoryError(f"no number of 0 to {MAX_ARENA} is free in {SHM_DIRECTORY}")
