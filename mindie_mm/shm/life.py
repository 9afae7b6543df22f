"""Locks that say who lives: held for life, dropped by the kernel on any death, seen across containers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from weakref import WeakSet


class LifeLock:
    """An flock of this process on an open file; takes over the descriptor.

    The lock belongs to the open file description: whoever maps the file must do so through another one, since a
    mapping keeps its description, and with it the lock, alive in every forked child.
    """

    def __init__(self, descriptor: int) -> None:
        """BlockingIOError if another process holds the lock; the descriptor then stays the caller's."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptor: int | None = descriptor
        _held.add(self)

    @property
    def descriptor(self) -> int:
        """The locked file; -1 once released."""
        return -1 if self._descriptor is None else self._descriptor

    @property
    def held(self) -> bool:
        """False once released, and in a forked child: the lock is the parent's."""
        return self._descriptor is not None

    def release(self) -> None:
        """Drops the lock. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


_held: WeakSet[LifeLock] = WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def unlink_same(path: Path, descriptor: int) -> bool:
    """Unlinks `path` if it still is the file of the descriptor; whether it was."""
    try:
        if not os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor)):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def is_locked(descriptor: int) -> bool:
    """Whether some process holds a LifeLock on the file of this descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
