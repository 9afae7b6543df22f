"""The Unix socket of --uds. Only processes of the service's user can connect to this socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from mindie_mm.errors import OperationalError, os_errors_as

_MODE = 0o600


@contextmanager
def bound_unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket that is bound to the file `path`, but does not listen yet. Remove the file at exit.

    A file that was left by a killed service is replaced. The path is reserved while the service loads its model and
    does not listen yet: a second socket, an abstract one, has a name that is derived from the path.

    Raises:
        OperationalError: Another service has reserved the path, another process listens on the file, the file is not a
            socket, or the file cannot be created.

    """
    with ExitStack() as stack, os_errors_as(OperationalError, f"cannot listen on {path}"):
        resolved = path.parent.resolve() / path.name
        guard = stack.enter_context(socket.socket(socket.AF_UNIX))
        guard.bind(f"\0mindie_mm {sha256(os.fsencode(resolved)).hexdigest()}")
        _remove_stale(path)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        os.fchmod(listener.fileno(), _MODE)  # `bind` creates the file with this mode
        listener.bind(os.fspath(path))
        stack.callback(_remove, path, path.lstat())
        leaving = stack.pop_all()
    with leaving:
        yield listener


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
