"""Creation of files in /dev/shm, and the space that is free there.

A file gets a name only when it is complete. If the process dies before that, no file remains.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.format.layout import SHM_DIRECTORY, needing_proc


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """Use of the /dev/shm file system by all processes.

    Only the memory of the machine limits a tmpfs that is mounted with `size=0`. Such a file system does not report how
    much of it is used.
    """

    total_bytes: int | None
    """Size of the file system in bytes, or None if the size is not limited."""
    used_bytes: int | None
    """Used space in bytes, or None if the size is not limited."""
    free_bytes: int | None
    """Free space in bytes, or None if the size is not limited."""
    total_files: int | None
    """Maximum number of files, or None if the number is not limited."""
    free_files: int | None
    """Number of files that can still be created, or None if the number is not limited."""

    @classmethod
    def now(cls) -> ShmSpace:
        """Return how much of /dev/shm is used now. Raise SharedMemoryError if there is no /dev/shm."""
        with os_errors_as(SharedMemoryError, f"the space in {SHM_DIRECTORY} cannot be read"):
            space = os.statvfs(SHM_DIRECTORY)
        files = (space.f_files, space.f_favail) if space.f_files else (None, None)
        if not space.f_blocks:
            return cls(None, None, None, *files)
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return cls(total, total - space.f_bfree * space.f_frsize, free, *files)

    def why_no_file(self) -> str | None:
        """Return why no file can be created and what to do about it, or None if inodes are free."""
        if self.free_files != 0:
            return None
        return (
            f"all of its {self.total_files} inodes are used. Remove unused files (`mindie-mm shm gc` removes "
            f"the files of dead processes), or run `mount -o remount,nr_inodes=<number> {SHM_DIRECTORY}`"
        )


_HOW_TO_GET_ROOM = (
    "reclaim the memory of dead processes (`mindie-mm shm gc`), request less memory, or enlarge /dev/shm: `mount -o "
    "remount,size=<bytes> /dev/shm`, --shm-size in Docker, or an emptyDir with medium Memory in Kubernetes"
)


def make_anonymous() -> int:
    """Create an unnamed empty file with mode 0600 and return its descriptor.

    Raises:
        SharedMemoryError: The file cannot be created.

    """
    try:
        return os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        why = (ShmSpace.now().why_no_file() or _HOW_TO_GET_ROOM) if full else None
        message = f"{error.strerror}: {why}" if why else error.strerror
        raise SharedMemoryError(f"cannot create a file in {SHM_DIRECTORY}: {message}") from error


def reserve(descriptor: int, nbytes: int, what: str) -> None:
    """Allocate all pages of a file, so that a later write does not raise SIGBUS because /dev/shm is full.

    Args:
        descriptor: The open file.
        nbytes: Size to allocate in bytes.
        what: Purpose of the file, for error messages.

    Raises:
        SharedMemoryError: There is not enough space, or the allocation fails for another reason.

    """
    space = ShmSpace.now()
    free = "no free space" if space.free_bytes is None else f"{space.free_bytes} of {space.total_bytes} bytes free"
    why = f"{SHM_DIRECTORY} has {free}, but {what} needs {nbytes}; {_HOW_TO_GET_ROOM}"
    if space.free_bytes is not None and nbytes > space.free_bytes:
        raise SharedMemoryError(why)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise SharedMemoryError(why) from error
        raise SharedMemoryError(f"{nbytes} bytes cannot be reserved for {what}: {error.strerror}") from error


def reopened(descriptor: int) -> int:
    """Open the same file again, and return a descriptor with its own open file description.

    Map a locked file through such a descriptor. A mapping keeps its open file description alive in every forked child,
    and a lock lasts as long as the description that it belongs to.

    Raises:
        SharedMemoryError: The file cannot be opened again, or /proc is not mounted.

    """
    with os_errors_as(SharedMemoryError, f"cannot reopen a file in {SHM_DIRECTORY}"), needing_proc():
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def give_name(descriptor: int, name: str) -> None:
    """Link the file into /dev/shm.

    Raises:
        FileExistsError: Another file has the name.
        OSError: The file cannot be linked.
        SharedMemoryError: /proc is not mounted.

    """
    with needing_proc():
        Path(f"/proc/self/fd/{descriptor}").stat()
    directory = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory descriptor, os.link calls linkat(AT_SYMLINK_FOLLOW), which follows the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory)
    finally:
        os.close(directory)
