"""The spool: a folder in which every live request has a directory with its path file and its media.

A directory has a hidden name while it is being created and while it is being removed. Under its final name, it always
has a path file. A live request holds a lock on its path file.
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
from mindie_mm.shm.liveness_lock import NO_LOCKS, LivenessLock, is_same, lock_of_the_dead
from mindie_mm.shm.path_file import PATH_FILE_NAME, release

_HIDDEN = ".mindie_mm-"

# The sticky bit marks request directories. It has no other effect in a folder that only one user can write to.
# Directories without the sticky bit are never removed, because a data set can have the same file names, such as
# `a/shm_name.txt` and `a/image/`.
_MARK = stat.S_ISVTX

# Minimum age in seconds at which a hidden directory counts as abandoned: _MAKING_S if it has no path file, and
# _LOCKING_S if no process has locked its path file. Another process may still be creating a younger directory.
_MAKING_S = 60.0
_LOCKING_S = 1.0


@dataclass(frozen=True, slots=True)
class RequestDirectory:
    """Directory of a live request."""

    path: Path
    path_file: Path


def make_spool(root: Path) -> None:
    """Create the folder of request directories with mode 0700, if it does not exist.

    In a folder that all users can write to, such as /tmp, another user may have created the spool, or a symbolic link
    with its name. This function rejects such a spool.

    Raises:
        SharedMemoryError: The folder cannot be created, is not a directory of this user, or is writable by other users.

    """
    if not root.is_dir():  # each request calls this function, and `mkdir` takes longer to find the folder
        with os_errors_as(SharedMemoryError, f"spool {root} cannot be created"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(root)


def _require_private(root: Path) -> None:
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SharedMemoryError(f"spool {root} is not a directory")
    if status.st_uid != os.geteuid():
        raise SharedMemoryError(
            f"spool {root} belongs to user {status.st_uid}, not to user {os.geteuid()}. Choose another folder"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SharedMemoryError(
            f"spool {root} has mode {stat.S_IMODE(status.st_mode):o}: other users can write to it. Choose a folder "
            "that only this user can write to"
        )


@contextmanager
def request_directory(root: Path, request_id: str | None = None) -> Iterator[RequestDirectory]:
    """Create the directory `<root>/<request_id>/` with an empty path file, as a context manager.

    The directory has mode 1700. On exit, the blocks and segments in the path file are freed and the directory is
    removed. The context holds a lock on the path file, which shows `collect` that the request is alive.

    Args:
        root: The spool. It is created if it does not exist.
        request_id: Name of the directory, 1 to 255 bytes. If it is None, a random name is chosen.

    Raises:
        InputError: The request id is not a file name or is in use.
        SharedMemoryError: The directory cannot be created or removed, or `make_spool` rejects the spool.

    """
    name = uuid4().hex if request_id is None else request_id
    if not name or name in {".", ".."} or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise InputError(f"request id {name!r} is not a file name of 1 to 255 bytes")
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
            lock.close()


def request_directories(root: Path) -> list[Path]:
    """Return the request directories in a spool, including hidden directories.

    Raises:
        SharedMemoryError: The spool is not a directory of this user, or is writable by other users.

    """
    if not os.path.lexists(root):
        return []
    _require_private(root)
    named = {path_file.parent for path_file in root.glob(f"*/{PATH_FILE_NAME}")}
    return sorted(filter(_is_marked, named.union(root.glob(f"{_HIDDEN}*"))))


def require_spool(root: Path) -> None:
    """Check that a folder can be used as a spool. A folder that does not exist passes the check.

    Raises:
        InputError: A directory in the folder has a path file but is not a request directory. It may contain other data.
        SharedMemoryError: The folder is not a directory of this user, or is writable by other users.

    """
    if not os.path.lexists(root):
        return
    _require_private(root)
    for path_file in root.glob(f"*/{PATH_FILE_NAME}"):
        if path_file.exists() and not _is_marked(path_file.parent):
            raise InputError(
                f"{path_file.parent} is not a request directory, because its mode is not 1700; {root} is therefore "
                "not a spool"
            )


def require_locks(folder: Path) -> None:
    """Check that the file system of a folder supports flock.

    Raises:
        SharedMemoryError: The file system does not support flock.
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
        f"spool {folder}: the file system does not support locks (flock: {error.strerror}), which show whether "
        "a request is alive. Mount the file system with locks (Lustre: -o flock), or choose another folder with --spool"
    )


def _is_marked(directory: Path) -> bool:
    """Return whether `request_directory` created the directory. Return False if it no longer exists."""
    with suppress(FileNotFoundError):
        return bool(directory.lstat().st_mode & stat.S_ISVTX)
    return False


def collect_request(path: Path, *, dry_run: bool = False) -> bool:
    """Free the blocks of a dead request and remove its directory.

    Args:
        path: The request directory.
        dry_run: Whether to report the result without changing anything.

    Returns:
        Whether the directory was removed. False if the request is alive or the directory no longer exists.

    Raises:
        MindieMMError: `release` could not free all blocks. The directory has been removed nevertheless.
        OSError: The directory cannot be removed.

    """
    hidden, path_file = path.name.startswith(_HIDDEN), path / PATH_FILE_NAME
    try:
        descriptor = os.open(path_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # the process that created or removed the directory died, or is still creating it
        return hidden and _is_older(path, _MAKING_S) and (dry_run or _remove(path))
    try:
        if hidden and not _is_older(path_file, _LOCKING_S):
            return False
        # By the time this process has acquired the lock, another request may use the name of the directory.
        return lock_of_the_dead(descriptor) and is_same(path_file, descriptor) and (dry_run or _remove(path))
    finally:
        os.close(descriptor)


def _is_older(path: Path, seconds: float) -> bool:
    """Return whether the file was last modified at least `seconds` ago. Return False if it does not exist."""
    with suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime >= seconds
    return False


def _make(path: Path) -> LivenessLock:
    """Create a request directory and return its lock. The path file is locked before the directory gets its name."""
    hidden = _hidden(path.parent)
    path_file = hidden / PATH_FILE_NAME
    try:
        with ExitStack() as undo:
            hidden.mkdir(mode=0o700 | _MARK)
            undo.callback(hidden.rmdir)
            undo.callback(path_file.unlink, missing_ok=True)
            faults.point("making-directory")
            lock = _lock_new(path_file)
            undo.callback(lock.close)
            hidden.rename(path)
            undo.pop_all()
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            raise InputError(f"request directory {path} already exists") from error
        if error.errno in NO_LOCKS:
            raise _no_locks(path.parent, error) from error
        raise SharedMemoryError(f"request directory {path} cannot be created: {error.strerror}") from error
    return lock


def _lock_new(path_file: Path) -> LivenessLock:
    descriptor = os.open(path_file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return LivenessLock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _remove(path: Path) -> bool:
    """Free the blocks of a request and remove its directory, even if a block cannot be freed.

    The directory first gets a hidden name. If a tokenizer process is still working on the request, it then fails to
    record a block, and does not create a new path file. Return False if the directory does not exist.
    """
    hidden = _hidden(path.parent)
    faults.point("before-remove")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return False
    except OSError:  # for example, a read-only file system: free the shared memory nevertheless
        release(path / PATH_FILE_NAME)
        raise
    faults.point("hidden")
    try:
        release(hidden / PATH_FILE_NAME)
        faults.point("released")
    finally:
        with suppress(FileNotFoundError):
            _delete(hidden)
    faults.point("removed")
    return True


def _delete(directory: Path) -> None:
    """Delete a request directory. Most have only files, for which `rmtree` takes much longer."""
    try:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
    except IsADirectoryError:
        shutil.rmtree(directory)


def _hidden(root: Path) -> Path:
    return root / f"{_HIDDEN}{uuid4().hex}"
