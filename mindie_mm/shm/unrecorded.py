"""Files in /dev/shm that neither an arena nor a path file accounts for, such as segments that MindIE left behind.

No other process can know whether such a file is still needed, so only an operator removes it, by its name.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.errors import InputError, MindieMMError, SharedMemoryError, os_errors_as
from mindie_mm.shm.arena_info import arena_files, opened
from mindie_mm.shm.format.layout import SHM_DIRECTORY
from mindie_mm.shm.path_file import PATH_FILE_NAME, read_contents
from mindie_mm.shm.spool import request_directories

_File = tuple[str, str]
"""Device and inode of a file, as in /proc/<pid>/maps."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """File in /dev/shm that is not an arena and is not listed in a path file."""

    name: str
    uid: int
    """User that owns the file."""
    age_s: float
    """Time since the file was created or last written with a system call."""
    num_bytes: int
    mapped: bool | None
    """True if a process maps the file. None if the processes of the owner cannot be examined."""
    pids: tuple[int, ...]
    """Processes that map the file."""


def unrecorded(spools: Iterable[Path] = ()) -> list[SegmentInfo]:
    """Return the regular files in /dev/shm, of all users, that no arena or path file accounts for, sorted by name.

    Only the path files in `spools` are read. Segments that are listed in other path files are returned, because those
    path files cannot be found.

    Raises:
        SharedMemoryError: /dev/shm cannot be read.

    """
    known = {name for root in spools for name in _recorded(root)} | {path.name for path in _arenas()}
    with os_errors_as(SharedMemoryError, f"{SHM_DIRECTORY} cannot be read"):
        names = sorted(set(os.listdir(SHM_DIRECTORY)) - known)  # noqa: PTH208 - a Path for each of thousands is slow
    found: dict[str, os.stat_result] = {}
    for name in names:
        with suppress(FileNotFoundError):
            if stat.S_ISREG((status := os.lstat(SHM_DIRECTORY / name)).st_mode):
                found[name] = status
    if not found:
        return []
    mappings, hidden, now = *_mappings(), time.time()
    infos = []
    for name, status in found.items():
        pids = mappings.get(_file(status), ())
        mapped = None if not pids and status.st_uid in hidden else bool(pids)
        infos.append(SegmentInfo(name, status.st_uid, max(0.0, now - status.st_mtime), status.st_size, mapped, pids))
    return infos


def require_removable(name: str) -> None:
    """Raise InputError unless a file in /dev/shm is a regular file of this user, and not an arena."""
    path = SHM_DIRECTORY / name
    with os_errors_as(InputError, f"{path} cannot be removed"):
        status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise InputError(f"{path} is not a regular file of user {os.geteuid()}")
    if path in _arenas():
        raise InputError(f"{path} is an arena; `mindie-mm shm gc` removes the arenas of dead processes")


def remove(name: str) -> bool:
    """Remove a file from /dev/shm. Processes that map the file keep their mappings.

    Returns:
        Whether this call removed the file.

    Raises:
        SharedMemoryError: The file cannot be removed.

    """
    path = SHM_DIRECTORY / name
    with os_errors_as(SharedMemoryError, f"{path} cannot be removed"), suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


def _arenas() -> set[Path]:
    """Return the paths of this user's arenas, and of all files of other users that are named like arenas."""
    found = set()
    for _, path in arena_files():
        with suppress(FileNotFoundError), opened(path, os.O_RDONLY) as descriptor:
            if descriptor is not None or path.lstat().st_uid != os.geteuid():
                found.add(path)
    return found


def _recorded(root: Path) -> Iterator[str]:
    """Yield the segments in the path files of a spool. Skip files that cannot be read."""
    with suppress(MindieMMError):
        for directory in request_directories(root):
            with suppress(MindieMMError):
                yield from read_contents(directory / PATH_FILE_NAME).segments


def _file(status: os.stat_result) -> _File:
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)


def _mappings() -> tuple[Mapping[_File, tuple[int, ...]], set[int]]:
    """Return the processes that map each file, and the users with processes whose mappings cannot be read."""
    mappings: dict[_File, tuple[int, ...]] = {}
    hidden: set[int] = set()
    with os_errors_as(SharedMemoryError, "/proc cannot be read"):
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - names suffice
    for pid in pids:
        process = Path("/proc", str(pid))
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            uid = process.stat().st_uid
            try:
                lines = (process / "maps").read_text(errors="replace").splitlines()
            except PermissionError:
                hidden.add(uid)
                continue
            for device, inode in {tuple(line.split(maxsplit=5)[3:5]) for line in lines}:
                mappings[device, inode] = (*mappings.get((device, inode), ()), pid)
    return mappings, hidden
