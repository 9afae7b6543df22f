"""Host memory: measurements of free and used memory, lazily allocated zeros, and allocator settings."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil
import torch

from mindie_mm.errors import DeviceError, os_errors_as
from mindie_mm.settings import cgroup

_MiB, _GiB = 2**20, 2**30
MAPPED_BYTES = 32 * _MiB
"""Smallest allocation that glibc maps separately (mmap). This is the maximum that glibc accepts."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h

# For cgroup version 2 and version 1: the files with a group's limit and usage, and the keys in memory.stat for memory
# that counts as used but that the kernel can reclaim. This is the page cache, whether or not a page was read twice.
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes(mount: Path = cgroup.MOUNT, own: Path = cgroup.OWN) -> int:
    """Return the amount of memory that this process may allocate, in bytes.

    The host's free memory and the limits of the cgroups are taken into account.

    Args:
        mount: Has the same meaning as in `cgroup.folders`.
        own: Has the same meaning as in `cgroup.folders`.

    Raises:
        DeviceError: /proc is not mounted.

    """
    with _reading_proc():
        available = psutil.virtual_memory().available
    return min([available, *_left(mount, own)])


def _reading_proc() -> AbstractContextManager[None]:
    return os_errors_as(
        DeviceError, "the host's free memory cannot be read from /proc (to mount /proc: mount -t proc proc /proc)"
    )


def _left(mount: Path, own: Path) -> Iterator[int]:
    for groups, (limit, usage, cached) in zip(cgroup.folders("memory", mount, own), _FILES, strict=True):
        for group in groups:
            most, used = cgroup.read(group / limit).strip(), cgroup.read(group / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" means that there is no limit
                stat = dict(line.split() for line in cgroup.read(group / "memory.stat").splitlines())
                yield max(0, int(most) - int(used) + sum(int(stat.get(key, 0)) for key in cached))


def grown_bytes(work: Callable[[], object]) -> int:
    """Run `work` and return the growth of this process's anonymous memory (RssAnon) in bytes.

    Shared memory and pages of files do not count, and neither does the memory of other processes.

    Raises:
        DeviceError: /proc is not mounted.

    """
    with suppress(AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)  # work that reused freed memory would seem to need none
    before = _anonymous_bytes()
    work()
    return max(0, _anonymous_bytes() - before)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages take no memory until they are written."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def keep_freed(kept_bytes: int = _GiB) -> None:
    """Make glibc's allocator keep up to `kept_bytes` of freed memory for later allocations instead of unmapping it.

    By default, glibc allocates an activation of more than 128 KiB as a separate mapping, or trims it from the heap when
    it is freed. Page faults on the same pages then took a tenth of a tower's CPU time for an image of 640x480 pixels.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, kept_bytes)


def _anonymous_bytes() -> int:
    with _reading_proc():
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(status.get("RssAnon", "0").split()[0]) * 1024
