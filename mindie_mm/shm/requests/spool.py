"""The spool: a folder in which every living request has a directory, with its path file and its media.

A directory is hidden, by its name, while it is made and while it is removed: under its own name it has a path file
that its request holds locked, or its request is dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from mindie_mm.errors import InputError, SharedMemoryError, os_errors_as
from mindie_mm.processes import faults
from mindie_mm.settings.paths import absolute
from mindie_mm.shm.memory.liveness_lock import NO_LOCKS, LivenessLock, is_same, lock_of_the_dead
from mindie_mm.shm.requests.path_file import PATH_FILE_NAME, release

_HIDDEN = ".mindie_mm-"

# The sticky bit, which says nothing else in a folder of one user: what lacks it is not ours to remove. A data set may
# look the same, `a/shm_name.txt` beside `a/image/`.
_MARK = stat.S_ISVTX

# A younger hidden directory may just be made: its path file, or the lock on that, is still to come.
_MAKING_S = 60.0
_LOCKING_S = 1.0


@dataclass(frozen=True, slots=True)
class RequestDirectory:
    """A living request's directory."""

    path: Path
    path_file: Path


def make_spool(root: Path) -> None:
    """Makes the folder of request directories (0700) if it is missing.

    SharedMemoryError unless it then is a directory of this user that nobody else may write: where everybody can make
    files, such as in /tmp, another user may have made it, or linked it elsewhere.
    """
    with os_errors_as(SharedMemoryError, f"spool {root} cannot be made"):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(root)


def _require_private(root: Path) -> None:
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SharedMemoryError(f"spool {root} is no directory")
    if status.st_uid != os.geteuid():
        raise SharedMemoryError(f"spool {root} is user {status.st_uid}'s, not user {os.geteuid()}'s")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SharedMemoryError(f"spool {root} has mode {stat.S_IMODE(status.st_mode):o}: others may write it")


@contextmanager
def request_directory(root: Path, request_id: str | None = None) -> Iterator[RequestDirectory]:
    """Makes `<root>/<request>/` (1700) with an empty path file; on any exit frees what that names and removes it all.

    A lock on the path file, held meanwhile, tells `collect` that the request lives. InputError for a request id that
    is no file name or is in use; SharedMemoryError if the directory cannot be made or removed, or `root` cannot serve
    as `make_spool` says.
    """
    name = uuid4().hex if request_id is None else request_id
    if not name or name in {".", ".."} or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise InputError(f"request id {name!r} is no file name of 1 to 255 bytes")
    root = absolute(root)
    make_spool(root)
    path = root / name
    lock = _make(path)
    try:
        yield RequestDirectory(path, path / PATH_FILE_NAME)
    finally:
        try:
            with os_errors_as(SharedMemoryError, f"request directory {path} cannot be removed"):
                _remove(path)
        finally:
            lock.release()


def request_directories(root: Path) -> list[Path]:
    """The request directories in a spool, hidden ones too. SharedMemoryError for what `make_spool` refuses."""
    if not os.path.lexists(root):
        return []
    _require_private(root)
    named = {path_file.parent for path_file in root.glob(f"*/{PATH_FILE_NAME}")}
    return sorted(filter(_is_marked, named.union(root.glob(f"{_HIDDEN}*"))))


def require_spool(root: Path) -> None:
    """InputError for a folder that holds somebody's data: a path file in a folder that is no request's.

    SharedMemoryError for what `make_spool` refuses.
    """
    if not os.path.lexists(root):
        return
    _require_private(root)
    for path_file in root.glob(f"*/{PATH_FILE_NAME}"):
        if path_file.exists() and not _is_marked(path_file.parent):
            raise InputError(f"{path_file.parent} is no request directory (mode 1700): {root} is no spool")


def require_locks(folder: Path) -> None:
    """Check that the file system of a folder has locks.

    Raises:
        SharedMemoryError: The file system has no locks.
        OSError: The folder cannot be written to.

    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise _no_locks(folder, error) from error


def _no_locks(folder: Path, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"spool {folder}: its file system has no locks (flock: {error.strerror}), which show whether a request is "
        "alive. Mount it with locks (Lustre: -o flock), or choose another folder with --spool"
    )


def _is_marked(directory: Path) -> bool:
    """Whether `request_directory` made it. False if it has gone meanwhile."""
    with suppress(FileNotFoundError):
        return bool(directory.lstat().st_mode & stat.S_ISVTX)
    return False


def collect_request(path: Path, *, dry_run: bool = False) -> bool:
    """Frees and removes a request directory; False if its request lives, or it has gone meanwhile.

    Once it is removed, raises what could not be freed, as `release`. OSError if it cannot be removed. `dry_run` only
    says whether it would be removed.
    """
    hidden, path_file = path.name.startswith(_HIDDEN), path / PATH_FILE_NAME
    try:
        descriptor = os.open(path_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # its maker or its remover died, unless it is just being made
        return hidden and _is_older(path, _MAKING_S) and (dry_run or _remove(path))
    try:
        if hidden and not _is_older(path_file, _LOCKING_S):
            return False
        # Once it is locked, another request may have that name.
        return lock_of_the_dead(descriptor) and is_same(path_file, descriptor) and (dry_run or _remove(path))
    finally:
        os.close(descriptor)


def _is_older(path: Path, seconds: float) -> bool:
    """False if it has gone meanwhile."""
    with suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime >= seconds
    return False


def _make(path: Path) -> LivenessLock:
    """The lock of a new request directory, which gets its name once it is locked."""
    hidden = _hidden(path.parent)
    path_file = hidden / PATH_FILE_NAME
    try:
        with ExitStack() as undo:
            hidden.mkdir(mode=0o700 | _MARK)
            undo.callback(hidden.rmdir)
            undo.callback(path_file.unlink, missing_ok=True)
            faults.point("making-directory")
            lock = _lock_new(path_file)
            undo.callback(lock.release)
            hidden.rename(path)
            undo.pop_all()
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            raise InputError(f"request directory {path} exists") from error
        if error.errno in NO_LOCKS:
            raise _no_locks(path.parent, error) from error
        raise SharedMemoryError(f"request directory {path} cannot be made: {error.strerror}") from error
    return lock


def _lock_new(path_file: Path) -> LivenessLock:
    descriptor = os.open(path_file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return LivenessLock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _remove(path: Path) -> bool:
    """Frees what a request's path file names, and removes its directory even if that fails; whether it was there.

    Hidden first: a tokenizer that still works for the request then fails to record, and makes no file anew.
    """
    hidden = _hidden(path.parent)
    faults.point("before-remove")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return False
    except OSError:  # read-only or broken file system; the shared memory is freed nevertheless
        release(path / PATH_FILE_NAME)
        raise
    faults.point("hidden")
    try:
        release(hidden / PATH_FILE_NAME)
        faults.point("released")
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(hidden)
    faults.point("removed")
    return True


def _hidden(root: Path) -> Path:
    return root / f"{_HIDDEN}{uuid4().hex}"
