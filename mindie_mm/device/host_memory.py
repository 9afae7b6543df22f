"""The host's memory: what is left of it for this process, what some work takes, and zeroes that take none yet."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil
import torch

_MiB, _GiB = 2**20, 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

_MOUNT = Path("/sys/fs/cgroup")
# Version 2 first, then 1: below which folder, and the files with the limit, the usage, and what of it can be dropped.
_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(mount: Path = _MOUNT, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken: what the host has, or the tightest control group around this process leaves.

    `mount` is where the control groups are mounted, `own` the file that says which of them this process is in.
    """
    return min([psutil.virtual_memory().available, *_left(mount, own)])


def _left(mount: Path, own: Path) -> Iterator[int]:
    groups = {PurePosixPath("/")}  # a container's own group is often mounted as the root, whatever its path is outside
    for line in _read(own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            groups |= {PurePosixPath(path), *PurePosixPath(path).parents}
    for folder, limit, usage, inactive in _FILES:
        for group in groups:
            at = mount / folder / group.relative_to("/")
            most, used = _read(at / limit).strip(), _read(at / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" is no limit
                stat = dict(line.split() for line in _read(at / "memory.stat").splitlines())
                yield max(0, int(most) - int(used) + int(stat.get(inactive, 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that this process took while it did `work`, beside what it had before.

    Where the kernel does not reset the high-water mark, what stays below an earlier mark is not seen.
    """
    _trim()
    before = mark = _resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is resident now
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


def keep_freed() -> None:
    """Has the allocator keep what is freed for what comes next, up to a GiB, until it is asked to give it back.

    Else each activation of more than 128 KiB is a mapping of its own, or the end of the heap that is given back: a
    tower's call on a picture of 640x480 spent a tenth of its processor time on faulting in the same pages again.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 * _MiB)  # the most that glibc takes
        library.mallopt(_M_TRIM_THRESHOLD, _GiB)


def _trim() -> None:
    """Gives back what the allocator keeps of freed memory: work that is served from it would seem to take nothing."""
    with suppress(AttributeError):  # the C library's own, where it is glibc
        ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status.get(name, "0").split()[0]) * 1024
