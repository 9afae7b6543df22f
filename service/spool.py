"""Where requests keep their path files and media: a folder per running service, a directory per request.

    <root>/lock                           held while a service looks at the others' folders
    <root>/<pid>-<random>/lock            held for as long as the service lives; the kernel drops it on any death
    <root>/<pid>-<random>/<request>/shm_name.txt
    <root>/<pid>-<random>/<request>/{image,video,audio}/<n>.<ext>

Leaving a request's directory frees the blocks that its path file names. Starting a service frees what services that
died have left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mindie_mm.errors import MindieMMError
from mindie_mm.inputs import KINDS
from mindie_mm.shm import PATH_FILE_NAME, RequestDirectory, release, request_directory

_log = logging.getLogger(__name__)


class Spool:
    """The folder of one running service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Holds a directory per request."""

    def request(self) -> AbstractContextManager[RequestDirectory]:
        """A directory for one request; leaving it frees the request's blocks and removes it."""
        return request_directory(self.path)


@contextmanager
def open_spool(root: Path) -> Iterator[Spool]:
    """A spool under `root`, which may be shared; frees first what services that died have left there."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(root / "lock"):
        for folder in root.iterdir():
            if folder.is_dir():
                _reclaim(folder)
        path = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        own_lock = _try_lock(path / "lock")
    assert own_lock is not None, "a new folder's lock is free"
    try:
        yield Spool(path)
    finally:
        with _locked(root / "lock"):
            os.close(own_lock)
            _reclaim(path)


def remove_media(directory: Path) -> None:
    """Deletes a request's media files; its path file stays."""
    for kind in KINDS:
        shutil.rmtree(directory / kind, ignore_errors=True)


def _reclaim(folder: Path) -> None:
    """Frees what the requests in `folder` hold and removes it, unless a living service holds its lock."""
    lock = _try_lock(folder / "lock")
    if lock is None:
        return
    try:
        for directory in folder.iterdir():
            if directory.is_dir():
                _release(directory / PATH_FILE_NAME)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _release(path_file: Path) -> None:
    try:
        freed = release(path_file)
    except MindieMMError as error:  # a damaged file must not keep a service from starting
        _log.warning("%s", error)
    else:
        _log.warning("freed %d blocks that a request of a service that died has left", freed)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if another one does."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
