"""Segments of MindIE's wire: files of /dev/shm that hold one array each, from their first byte, and nothing else.

Python's own SharedMemory is not used: the resource tracker behind it unlinks segments that others still use.
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
from mindie_mm.shm.format.layout import SHM_DIRECTORY
from mindie_mm.shm.format.mindie_words import PREFIX, is_segment_name
from mindie_mm.shm.memory.anonymous_file import make_anonymous, reserve

MAX_SEGMENT_BYTES = 10**9

NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR)
"""Errors of opening a link, another user's file, a socket, a directory to be written."""


def free_name() -> str:
    """A random segment name that no file has at this moment."""
    while os.path.lexists(SHM_DIRECTORY / (name := f"{PREFIX}{secrets.token_hex(4)}")):
        pass
    return name


@contextmanager
def reserved(size: int) -> Iterator[int]:
    """The descriptor of a new file of `size` bytes that has no name yet: a death until then leaves nothing.

    InputError and LimitExceeded for a size that is not 1 to 10^9, SharedMemoryError where there is no room for it.
    """
    if type(size) is not int or size < 1:
        raise InputError(f"a segment of {size!r} bytes; it takes a whole number of at least 1")
    if size > MAX_SEGMENT_BYTES:
        raise LimitExceeded(f"a segment of {size} bytes; the limit is {MAX_SEGMENT_BYTES}")
    descriptor = make_anonymous()
    try:
        reserve(descriptor, size, "the segment")
        yield descriptor
    except OSError as error:
        raise SharedMemoryError(f"a segment of {size} bytes cannot be made: {error.strerror}") from error
    finally:
        os.close(descriptor)


@contextmanager
def opened_segment(name: str, size: int) -> Iterator[int]:
    """A descriptor to read a segment of exactly `size` bytes by.

    SegmentMissing if there is no regular file of this user by that name, or one that was cut short; CorruptReference
    for a longer one; LimitExceeded for more than 10^9 bytes.
    """
    assert is_segment_name(name), name
    path = SHM_DIRECTORY / name
    if size > MAX_SEGMENT_BYTES:
        raise LimitExceeded(f"segment {path} is to hold {size} bytes; the limit is {MAX_SEGMENT_BYTES}")
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
            raise SegmentMissing(f"{path} is no segment: no regular file of user {os.geteuid()}")
        require_size(name, status.st_size, size)
        if status.st_size > size:
            raise CorruptReference(f"segment {path} has {status.st_size} bytes, its words and dtype make {size}")
        yield descriptor
    finally:
        os.close(descriptor)


def require_size(name: str, actual: int, size: int) -> None:
    """SegmentMissing for a segment with fewer bytes than its words and dtype make."""
    if actual < size:
        raise SegmentMissing(f"segment {SHM_DIRECTORY / name} has {actual} bytes, its words and dtype make {size}")


def map_segment(name: str, size: int) -> mmap.mmap:
    """All of a segment, read-only; errors as `opened_segment`, SharedMemoryError if it cannot be mapped."""
    with opened_segment(name, size) as descriptor:
        try:
            return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise SharedMemoryError(f"{SHM_DIRECTORY / name} cannot be mapped: {error.strerror}") from error


def segment_bytes(name: str) -> int | None:
    """How long a segment is; None if there is no regular file of this user by that name."""
    assert is_segment_name(name), name
    try:
        status = (SHM_DIRECTORY / name).lstat()
    except FileNotFoundError:
        return None
    return status.st_size if _is_ours(status) else None


def unlink_segment(name: str) -> bool:
    """Removes a segment and says whether this call did it: it leaves alone what is no regular file of this user.

    SharedMemoryError if it cannot be removed.
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
