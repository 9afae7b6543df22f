"""Locks that show whether a process is alive, also across containers. The kernel drops a lock on any kind of death."""

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
    """An flock of this process on an open file; takes over the descriptor.

    The lock belongs to the open file description: whoever maps the file must do so through another one, since a
    mapping keeps its description, and with it the lock, alive in every forked child.
    """

    def __init__(self, descriptor: int, *, needed: bool = True) -> None:
        """Lock the open file and take over its descriptor. On an error the caller keeps the descriptor.

        Args:
            descriptor: The open file.
            needed: Whether a file system without locks is an error. If not, the object counts as held there.

        Raises:
            BlockingIOError: Another process holds the lock.
            OSError: Locking fails for another reason.

        """
        self.descriptor = descriptor
        """The locked file; -1 once released."""
        self.held = True
        """False once released, and in a forked child: the lock is the parent's."""
        _held.add(self)  # before it is locked: another thread may fork at any moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            if not needed and isinstance(error, OSError) and error.errno in NO_LOCKS:
                return
            _held.discard(self)
            raise

    def release(self) -> None:
        """Drops the lock. Idempotent."""
        if self.held:
            descriptor, self.descriptor, self.held = self.descriptor, -1, False
            _held.discard(self)
            os.close(descriptor)


_held: set[LivenessLock] = set()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def is_same(path: Path, descriptor: int) -> bool:
    """Whether `path` is the file of the descriptor."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def unlink_same(path: Path, descriptor: int) -> bool:
    """Unlinks `path` if it still is the file of the descriptor; whether it was."""
    try:
        if is_same(path, descriptor):
            path.unlink()
            return True
    except FileNotFoundError:
        pass
    return False


def lock_of_the_dead(descriptor: int) -> bool:
    """Takes the lock of a file that no living process holds a LivenessLock on; False if one does.

    Whoever asks `is_locked` holds a shared lock meanwhile, which is waited for, a second at most: it may sleep.
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
    """Whether some process holds a LivenessLock on the file of this descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
