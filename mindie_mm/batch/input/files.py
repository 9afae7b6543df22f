"""Replaces files atomically, and locks folders against a second writer."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.processes import faults
from mindie_mm.processes.writing import sync
from mindie_mm.shm.liveness_lock import NO_LOCKS

_log = logging.getLogger(__name__)

_PIECE = 1 << 20
_WRONG_PATH = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Error numbers of failures that the user must solve with another path or other permissions."""


@contextmanager
def creating(path: Path, advice: str) -> Iterator[None]:
    """Convert an OSError from creating or opening an output to an error of this package.

    Raises:
        InputError: The user must choose another path or change permissions. The message ends with `advice`.
        StorageError: The file system fails or is full.

    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.errno not in _WRONG_PATH:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error
        blocking = next((one for one in (path, *path.parents) if os.path.lexists(one) and not one.is_dir()), None)
        why = error.strerror or str(error)  # Python's own error for a pipe has no errno
        if isinstance(error, FileExistsError | NotADirectoryError) and blocking is not None:
            why = f"{blocking} is a broken symbolic link" if blocking.is_symlink() else f"{blocking} is not a folder"
        raise InputError(f"{path} cannot be written: {why}. {advice}") from error


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path to write to. On exit, sync the file there and rename it to `path`.

    Args:
        path: Path of the finished file.
        writer: Name of this writer. Processes that write `path` at the same time must have different names.

    Raises:
        StorageError: The file cannot be written, synced or renamed.

    """
    unfinished = path.with_name(f"{path.name}{writer and '.' + writer}.partial")
    try:
        with os_errors_as(StorageError, f"{path} cannot be written"):
            yield unfinished
            sync(unfinished)
            faults.point(f"written {path.name}")
            unfinished.rename(path)
            sync_folder(path.parent)
            faults.point(f"named {path.name}")
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def locked(descriptor: int, what: Path) -> bool:
    """Lock an open file, so that no other call can write to `what`.

    If the file system does not support locks, log a warning and return True.

    Returns:
        False if another process holds the lock.

    Raises:
        OSError: Locking fails for another reason.

    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _log.warning(
            "%s: the file system does not support locks (flock: %s). Do not let another process write there",
            what,
            error.strerror,
        )
    return True


def file_digest(path: Path) -> str:
    """Return the first 128 bits of a file's BLAKE3 digest, in hexadecimal."""
    digest = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest(16)


def content_digest(content: bytes) -> str:
    """Return the same digest as `file_digest` for the content of a file."""
    return blake3(content).hexdigest(16)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk. Do nothing if its file system does not support this.

    Raises:
        OSError: The sync failed.

    """
    try:
        sync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and some FUSE file systems can only sync files
            raise
