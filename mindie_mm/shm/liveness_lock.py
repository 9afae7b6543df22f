"""Locks that show whether a process is alive, even in another container. The kernel drops them if a process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of flock on a file system without locks, such as Lustre without `-o flock` or NFS without lockd."""


class LivenessLock:
    """Exclusive flock of this process on an open file. The object owns the file's descriptor.

    The lock belongs to the open file description. A mapping keeps its description, and thus the lock, alive in every
    forked child. Therefore, map the file through another open file description (`reopened`).
    """

    def __init__(self, descriptor: int, *, needed: bool = True) -> None:
        """Lock the open file and take ownership of its descriptor. If the call raises, the caller keeps the descriptor.

        Args:
            descriptor: The open file.
            needed: Whether to raise OSError if the file system has no locks. If False, the lock counts as held on such
                a file system.

        Raises:
            BlockingIOError: Another process holds the lock.
            OSError: Locking fails for another reason.

        """
        self.descriptor = descriptor
        """Descriptor of the locked file. -1 after `close`."""
        self.held = True
        """True while this process holds the lock. False after `close` and in a forked child."""
        _held.add(self)  # before the lock is taken, because another thread may fork at any moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            if not needed and isinstance(error, OSError) and error.errno in NO_LOCKS:
                return
            _held.discard(self)
            raise

    def close(self) -> None:
        """Release the lock and close the file. Idempotent."""
        if self.held:
            descriptor, self.descriptor, self.held = self.descriptor, -1, False
            _held.discard(self)
            os.close(descriptor)


_held: set[LivenessLock] = set()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def is_same(path: Path, descriptor: int) -> bool:
    """Return whether `path` refers to the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def unlink_same(path: Path, descriptor: int) -> bool:
    """Unlink `path` if it still refers to the open file. Return whether this call unlinked it."""
    try:
        if is_same(path, descriptor):
            path.unlink()
            return True
    except FileNotFoundError:
        pass
    return False


def lock_of_the_dead(descriptor: int) -> bool:
    """Lock a file unless a live process holds a LivenessLock on it. Return whether this call locked the file.

    A call to `is_locked` in another process briefly acquires a shared lock. This function waits up to 1 s until the
    other process has released its shared lock.
    """
    until = time.monotonic() + 1
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_locked(descriptor):
            return False
        time.sleep(0.0005)
    return False


def is_locked(descriptor: int) -> bool:
    """Return whether some process holds a LivenessLock on the open file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
