"""How full /dev/shm is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.layout import SHM_DIRECTORY


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """How full the file system is, whoever uses it."""

    total_bytes: int
    used_bytes: int
    free_bytes: int

    @classmethod
    def now(cls) -> ShmSpace:
        """SharedMemoryError without a /dev/shm."""
        with os_errors_as(SharedMemoryError, f"{SHM_DIRECTORY} cannot be looked at"):
            space = os.statvfs(SHM_DIRECTORY)
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        return cls(total, total - space.f_bfree * space.f_frsize, free)
