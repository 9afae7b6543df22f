"""Linux system calls for which the standard library has no wrapper, and system call numbers for seccomp filters.

The numbers are from arch/x86/entry/syscalls/syscall_64.tbl and, for aarch64, include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

NUMBERS: Mapping[str, tuple[int, int]] = {
    "brk": (12, 214),
    "capset": (126, 91),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fstat": (5, 80),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "read": (0, 63),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rt_sigprocmask": (14, 135),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "seccomp": (317, 277),
    "sendto": (44, 206),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "write": (1, 64),
    "writev": (20, 66),
}
"""System call numbers on x86-64 and aarch64, by name."""
ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* constants by the architecture's name in `uname -m`, in the order of `NUMBERS`."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38


def number_of(name: str, machine: str) -> int:
    """Return the number of the system call `name` on `machine`, which is a key of `ARCHITECTURES`."""
    return NUMBERS[name][[*ARCHITECTURES].index(machine)]


def call(name: str, *arguments: Any) -> int:
    """Make the system call `name`. Arguments are integers or ctypes pointers.

    Raises:
        OSError: The call failed. The error is ENOSYS if `ARCHITECTURES` does not list the machine's architecture.

    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _checked(_libc().syscall(ctypes.c_long(number_of(name, platform.machine())), *map(_word, arguments)))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process with the system call prctl. Raise OSError if the kernel refuses."""
    _checked(_libc().prctl(option, *map(_word, (value, 0, 0, 0))))


def _word(argument: Any) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
