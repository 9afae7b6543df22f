"""Segments of MindIE's wire format. A segment is a file in /dev/shm with the bytes of one array.

This module does not use Python's SharedMemory, whose resource tracker unlinks segments that other processes still use.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, SegmentMissing, SharedMemoryError
from mindie_mm.shm.dev_shm import make_anonymous, reserve
from mindie_mm.shm.format.layout import SHM_DIRECTORY
from mindie_mm.shm.format.mindie_words import PREFIX, is_segment_name

MAX_SEGMENT_BYTES = 10**9

NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR)
"""Error numbers of `open` for a symbolic link, another user's file, a socket, or a directory opened for writing."""


def free_name() -> str:
    """Return a random segment name that is not in use at the moment."""
    while os.path.lexists(SHM_DIRECTORY / (name := f"{PREFIX}{secrets.token_hex(4)}")):
        pass
    return name


@contextmanager
def reserved(size: int) -> Iterator[int]:
    """Create an unnamed file of `size` bytes for a segment, as a context manager.

    If the process dies before it gives the file a name, no file remains.

    Yields:
        The descriptor of the file, which is closed on exit.

    Raises:
        InputError: The size is not an integer of at least 1.
        LimitExceeded: The size is more than 10^9 bytes.
        SharedMemoryError: /dev/shm does not have enough space, or the file cannot be created.

    """
    if type(size) is not int or size < 1:
        raise InputError(f"the size of a segment is {size!r}; it must be an integer of at least 1")
    if size > MAX_SEGMENT_BYTES:
        raise LimitExceeded(f"the size of a segment is {size} bytes; the limit is {MAX_SEGMENT_BYTES}")
    descriptor = make_anonymous()
    try:
        reserve(descriptor, size, "the segment")
        yield descriptor
    except OSError as error:
        raise SharedMemoryError(f"a segment of {size} bytes cannot be created: {error.strerror}") from error
    finally:
        os.close(descriptor)


@contextmanager
def opened_segment(name: str, size: int) -> Iterator[int]:
    """Open a segment of exactly `size` bytes for reading, as a context manager.

    Yields:
        The descriptor of the segment, which is closed on exit.

    Raises:
        SegmentMissing: There is no regular file of this user with this name, or the file has fewer than `size` bytes.
        CorruptReference: The file has more than `size` bytes.
        LimitExceeded: The size is more than 10^9 bytes.
        SharedMemoryError: The file cannot be opened for another reason.

    """
    assert is_segment_name(name), name
    path = SHM_DIRECTORY / name
    if size > MAX_SEGMENT_BYTES:
        raise LimitExceeded(f"segment {path} would have {size} bytes; the limit is {MAX_SEGMENT_BYTES}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SegmentMissing(f"there is no segment {path}") from None
    except OSError as error:
        kind = SegmentMissing if error.errno in NOT_OURS else SharedMemoryError
        raise kind(f"segment {path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not _is_ours(status):
            raise SegmentMissing(f"{path} is not a segment: it is not a regular file of user {os.geteuid()}")
        require_size(name, status.st_size, size)
        if status.st_size > size:
            raise CorruptReference(
                f"segment {path} has {status.st_size} bytes, but its handle words and dtype require {size}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def require_size(name: str, actual: int, size: int) -> None:
    """Raise SegmentMissing if the segment has fewer bytes (`actual`) than its shape and dtype require (`size`)."""
    if actual < size:
        raise SegmentMissing(
            f"segment {SHM_DIRECTORY / name} has {actual} bytes, but its handle words and dtype require {size}"
        )


def map_segment(name: str, size: int) -> mmap.mmap:
    """Map a whole segment read-only.

    Raise the same errors as `opened_segment`, and SharedMemoryError if the segment cannot be mapped.
    """
    with opened_segment(name, size) as descriptor:
        try:
            return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise SharedMemoryError(f"{SHM_DIRECTORY / name} cannot be mapped: {error.strerror}") from error


def segment_bytes(name: str) -> int | None:
    """Return the size of a segment in bytes, or None if there is no regular file of this user with this name."""
    assert is_segment_name(name), name
    try:
        status = (SHM_DIRECTORY / name).lstat()
    except FileNotFoundError:
        return None
    return status.st_size if _is_ours(status) else None


def unlink_segment(name: str) -> bool:
    """Remove a segment. Do nothing if there is no regular file of this user with this name.

    Returns:
        Whether this call removed the segment.

    Raises:
        SharedMemoryError: The segment cannot be removed.

    """
    path = SHM_DIRECTORY / name
    if segment_bytes(name) is None:
        return False
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SharedMemoryError(f"{path} cannot be removed: {error.strerror}") from error
    return True


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
