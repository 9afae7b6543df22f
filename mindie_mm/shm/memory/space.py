"""Free space in /dev/shm."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.format.layout import SHM_DIRECTORY


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
