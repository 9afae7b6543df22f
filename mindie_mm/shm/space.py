"""How full /dev/shm is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.layout import SHM_DIRECTORY


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """How full the file system is, whoever uses it.

    A tmpfs that is mounted with `size=0` has no limit but the machine's memory: it does not count its blocks.
    """

    total_bytes: int | None
    """None without a limit."""
    used_bytes: int | None
    """None without a limit."""
    free_bytes: int | None
    """None without a limit."""
    total_files: int | None
    """Most files; None without a limit."""
    free_files: int | None
    """How many files can still be made; None without a limit."""

    @classmethod
    def now(cls) -> ShmSpace:
        """SharedMemoryError without a /dev/shm."""
        with os_errors_as(SharedMemoryError, f"{SHM_DIRECTORY} cannot be looked at"):
            space = os.statvfs(SHM_DIRECTORY)
        files = (space.f_files, space.f_favail) if space.f_files else (None, None)
        if not space.f_blocks:
            return cls(None, None, None, *files)
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return cls(total, total - space.f_bfree * space.f_frsize, free, *files)

    def why_no_file(self) -> str | None:
        """Return why no further file can be made, and what to do; None if there is room for one."""
        if self.free_files != 0:
            return None
        return (
            f"all of its {self.total_files} inodes are used: remove files that nobody needs (`mindie-mm shm gc` those "
            f"of the dead), or `mount -o remount,nr_inodes=<number> {SHM_DIRECTORY}`"
        )
