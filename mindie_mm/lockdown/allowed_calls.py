"""The system calls that a decoder may make, with the reason for each and the values that its arguments may have."""

from __future__ import annotations

import mmap
import signal
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Argument(NamedTuple):
    """Argument of a system call that is restricted to some values."""

    place: int
    """Index of the argument, from 0."""
    values: tuple[int, ...]
    """Allowed values of the lower 32 bits. The kernel ignores the upper half of an `int`."""
    is_pointer: bool = False
    """True if the upper half must be 0, too."""


class AllowedCall(NamedTuple):
    """System call that a decoder may make."""

    reason: str
    """Purpose of the call in a decoder."""
    arguments: tuple[Argument, ...] = ()
    """Restricted arguments. If one of them has another value, the call is refused."""


_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE, _MAP_NORESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x4000
_MADV_DONTNEED, _MADV_FREE, _MADV_HUGEPAGE = 4, 8, 14
_FUTEX_CALLS = tuple(
    command | flags
    for command in (0, 1, 9, 10)  # FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET
    for flags in (0, 128, 256, 128 | 256)  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
)
_CLOCKS = tuple(range(time.CLOCK_BOOTTIME + 1))
"""Clocks of the machine, of this process and of this thread. Other numbers are clocks of processes and devices."""


def allowed_calls(writable: Iterable[int], process: int) -> Mapping[str, AllowedCall]:
    """Return the system calls of a decoder, by name.

    None of these calls has a path argument. glibc 2.33 to 2.36 implements fstat() with newfstatat, which has a path
    argument and is therefore forbidden. `os.fstat` fails with these versions.

    The memory that the kernel charges to a decoder is limited because its new memory can only be private, anonymous
    and writable, which RLIMIT_DATA counts. Stacks, read-only mappings and files are not counted, although they need
    pages or page tables. The decoder can therefore not create, grow or move them: mremap is refused, and mprotect
    cannot make memory read-only after it has been written. glibc copies memory if mremap fails.

    A signal handler or signal mask could keep a decoder alive that uses too much processor time. No handler can be
    installed, and no signal can be blocked.

    Args:
        writable: Descriptors that may be written to.
        process: Process id of the decoder.

    """
    no_flags, own = (0,), (0, process)
    to_writable = Argument(0, tuple(writable))
    fixed_clock = (Argument(0, _CLOCKS),)
    return {
        # Files and the socket
        "read": AllowedCall("read a file of an item"),
        "pread64": AllowedCall("read a file of an item"),
        "lseek": AllowedCall("find the size of a file"),
        "fstat": AllowedCall("find the size of a file"),
        "close": AllowedCall("close a file of an item"),
        "recvmsg": AllowedCall("receive a message and its files", (Argument(2, no_flags),)),
        "recvfrom": AllowedCall("receive a message", (Argument(3, no_flags),)),
        "sendto": AllowedCall("send a reply", (to_writable, Argument(3, no_flags))),
        "write": AllowedCall("write to a log that is a pipe", (to_writable,)),
        "writev": AllowedCall("write to a log that is a pipe", (to_writable,)),
        # Memory
        "brk": AllowedCall("allocate memory from the heap"),
        "mmap": AllowedCall(
            "allocate memory, or reserve addresses for the heap of a thread",
            (Argument(2, (_PROT_NONE, _PROT_READ_WRITE)), Argument(3, (_PRIVATE, _PRIVATE | _MAP_NORESERVE))),
        ),
        "mprotect": AllowedCall("use reserved addresses", (Argument(2, (_PROT_READ_WRITE,)),)),
        "madvise": AllowedCall(
            "free memory, or use huge pages", (Argument(2, (_MADV_DONTNEED, _MADV_FREE, _MADV_HUGEPAGE)),)
        ),
        "munmap": AllowedCall("free memory"),
        # Locks, clocks and random numbers
        "futex": AllowedCall("acquire and release locks", (Argument(1, _FUTEX_CALLS),)),
        "sched_yield": AllowedCall("wait in a spin lock"),
        "clock_gettime": AllowedCall("measure time", fixed_clock),
        "clock_getres": AllowedCall("measure time", fixed_clock),
        "clock_nanosleep": AllowedCall("sleep", fixed_clock),
        "nanosleep": AllowedCall("sleep"),
        "restart_syscall": AllowedCall("continue a sleep after SIGSTOP and SIGCONT"),
        "gettimeofday": AllowedCall("measure time"),
        "getrandom": AllowedCall("seed hash tables and random numbers"),
        # The process and the machine
        "getpid": AllowedCall("abort()"),
        "gettid": AllowedCall("abort()"),
        "tgkill": AllowedCall("abort()", (Argument(0, (process,)), Argument(2, (signal.SIGABRT,)))),
        "rt_sigprocmask": AllowedCall("abort()", (Argument(0, (signal.SIG_UNBLOCK,)),)),
        "exit": AllowedCall("exit"),
        "exit_group": AllowedCall("exit"),
        "getrusage": AllowedCall("measure the processor time of this process"),
        "prlimit64": AllowedCall(
            "read a limit, but not set it", (Argument(0, own), Argument(2, (0,), is_pointer=True))
        ),
        "getcpu": AllowedCall("choose memory near the CPU"),
        "sched_getaffinity": AllowedCall("count CPUs to choose the number of threads", (Argument(0, own),)),
        "sysinfo": AllowedCall("read the size of memory; qsort() limits its buffer by it"),
    }
