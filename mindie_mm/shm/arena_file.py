"""How an arena's file comes to be: complete, reserved whole and locked before it has a name."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from dataclasses import replace

from mindie_mm.errors import InputError, SharedMemoryError
from mindie_mm.shm.layout import SHM_DIRECTORY, ArenaHeader, Owner, file_name
from mindie_mm.shm.life import LifeLock
from mindie_mm.shm.words import MAX_ARENA

HOW_TO_ENLARGE = (
    "make the arena smaller, or enlarge it: `mount -o remount,size=<bytes> /dev/shm`, in Docker --shm-size, in "
    "Kubernetes an emptyDir of medium Memory mounted there"
)


def create_file(capacity_bytes: int) -> tuple[ArenaHeader, LifeLock, mmap.mmap]:
    """A new arena file of this process: its header, its lock, and all of it mapped. InputError, SharedMemoryError."""
    if type(capacity_bytes) is not int or capacity_bytes < 1:
        raise InputError(f"an arena of {capacity_bytes!r} bytes; it takes a whole number of at least 1")
    header = ArenaHeader.plan(capacity_bytes, time.time_ns(), Owner.current())
    try:
        descriptor = os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SharedMemoryError(f"no file can be made in {SHM_DIRECTORY}: {error.strerror}") from error
    try:
        _reserve(descriptor, header.file_bytes)
        mapping = _map(descriptor, header.file_bytes)
        lock = LifeLock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        return _link(descriptor, header), lock, mapping
    except BaseException:
        lock.release()
        raise


def _reserve(descriptor: int, file_bytes: int) -> None:
    """Every page now, so that a full /dev/shm is an error here and never a SIGBUS later."""
    space = os.statvfs(SHM_DIRECTORY)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    why = f"{SHM_DIRECTORY} has {free} bytes free of {total}, the arena needs {file_bytes}; {HOW_TO_ENLARGE}"
    if file_bytes > free:
        raise SharedMemoryError(why)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SharedMemoryError(why) from error
        raise SharedMemoryError(f"{file_bytes} bytes cannot be reserved: {error.strerror}") from error


def _map(descriptor: int, file_bytes: int) -> mmap.mmap:
    """Through an open file description of its own, apart from the lock's."""
    second = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(second, file_bytes)
    finally:
        os.close(second)


def _link(descriptor: int, header: ArenaHeader) -> ArenaHeader:
    """Gives the file its name; the number may come out another one than asked for."""
    directory = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(MAX_ARENA + 1):
            header = replace(header, arena=secrets.randbelow(MAX_ARENA + 1))
            os.pwrite(descriptor, header.pack(), 0)
            try:
                # A directory descriptor makes this linkat(AT_SYMLINK_FOLLOW), which reaches the file behind /proc.
                os.link(f"/proc/self/fd/{descriptor}", file_name(header.arena), dst_dir_fd=directory)
            except FileExistsError:
                continue
            return header
    except OSError as error:
        raise SharedMemoryError(f"no arena can be named in {SHM_DIRECTORY}: {error.strerror}") from error
    finally:
        os.close(directory)
    raise SharedMemoryError(f"no number of 0 to {MAX_ARENA} is free in {SHM_DIRECTORY}")
