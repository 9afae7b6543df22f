"""The Unix socket of --uds. Only processes of the service's user can connect to this socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mindie_mm.errors import OperationalError, os_errors_as
from mindie_mm.shm.liveness_lock import LivenessLock, is_same, unlink_same

_MODE = 0o600


@contextmanager
def bound_unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket that is bound to the file `path`, but does not listen yet. Remove the file at exit.

    A file that was left by a killed service is replaced. The path is reserved while the service loads its model and
    does not listen yet: a file beside the socket is locked.

    Raises:
        OperationalError: Another service has locked the path, another process listens on the file, the file is not a
            socket, or a file cannot be created.

    """
    with ExitStack() as stack, os_errors_as(OperationalError, f"cannot listen on {path}"):
        _lock(path.with_name(f"{path.name}.lock"), stack)
        _remove_stale(path)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        os.fchmod(listener.fileno(), _MODE)  # `bind` creates the file with this mode
        listener.bind(os.fspath(path))
        stack.callback(_remove, path, path.lstat())
        leaving = stack.pop_all()
    with leaving:
        yield listener


def _lock(path: Path, stack: ExitStack) -> None:
    """Create and lock the file `path`. `stack` removes the file and releases the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            lock = LivenessLock(descriptor, needed=False)
        except BlockingIOError as error:
            os.close(descriptor)
            reason = f"another process has locked {path}; stop this process, or choose a path in a folder of your own"
            raise OSError(errno.EADDRINUSE, reason) from error
        stack.callback(lock.close)
        if is_same(path, descriptor):  # otherwise, another service has just removed its file
            stack.callback(unlink_same, path, descriptor)
            return


def _remove_stale(path: Path) -> None:
    """Remove the socket at `path` if no process listens on it. Raise OSError if `path` is anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "the file exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # connecting would block if the queue of the listening process is full
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another process listens on this socket")


def _remove(path: Path, created: os.stat_result) -> None:
    """Remove `path` if it is still the file that was created."""
    with suppress(OSError):  # the folder may be gone
        if os.path.samestat(path.lstat(), created):
            path.unlink()
