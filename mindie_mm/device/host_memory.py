"""The host's memory: what is left of it for this process, what some work takes, and zeroes that take none yet."""

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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

# Version 2, then 1: the files of a group with its limit, its usage, and the part of the usage that can be dropped.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(mount: Path = cgroup.MOUNT, own: Path = cgroup.OWN) -> int:
    """Return how many bytes this process may allocate: the host's free memory, or less if a control group leaves less.

    `mount` and `own` are as in `cgroup.folders`. Raises DeviceError if /proc is not mounted.
    """
    with _reading_proc():
        available = psutil.virtual_memory().available
    return min([available, *_left(mount, own)])


def _reading_proc() -> AbstractContextManager[None]:
    return os_errors_as(
        DeviceError, "the host's free memory cannot be read from /proc; mount it (mount -t proc proc /proc)"
    )


def _left(mount: Path, own: Path) -> Iterator[int]:
    for groups, (limit, usage, inactive) in zip(cgroup.folders("memory", mount, own), _FILES, strict=True):
        for group in groups:
            most, used = cgroup.read(group / limit).strip(), cgroup.read(group / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" is no limit
                stat = dict(line.split() for line in cgroup.read(group / "memory.stat").splitlines())
                yield max(0, int(most) - int(used) + int(stat.get(inactive, 0)))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory in bytes that `work` added to this process.

    If the kernel does not reset the high-water mark, only growth above an earlier mark is measured. Raises DeviceError
    if /proc is not mounted.
    """
    _trim()
    before = mark = _resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the mark to the resident size
    except OSError:
        mark = _resident("VmHWM")
    work()
    peak = _resident("VmHWM")
    taken = (peak if peak > mark else _resident("VmRSS")) - before
    _trim()
    return max(0, taken)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroes, whose pages take no memory until they are written."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def keep_freed(kept_bytes: int = _GiB) -> None:
    """Has the allocator keep what is freed for what comes next, up to `kept_bytes`, until it is asked to give it back.

    Else each activation of more than 128 KiB is a mapping of its own, or the end of the heap that is given back: a
    tower's call on a picture of 640x480 spent a tenth of its processor time on faulting in the same pages again.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 * _MiB)  # the most that glibc takes
        library.mallopt(_M_TRIM_THRESHOLD, kept_bytes)


def _trim() -> None:
    """Gives back what the allocator keeps of freed memory: work that is served from it would seem to take nothing."""
    with suppress(AttributeError):  # the C library's own, where it is glibc
        ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    with _reading_proc():
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(status.get(name, "0").split()[0]) * 1024
