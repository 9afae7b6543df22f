"""A seccomp filter: the system calls that a decoder may make. All others fail with EPERM.

The filter is a program of classic BPF, documented at docs.kernel.org/userspace-api/seccomp_filter.html. EPERM and not
the end of the process, so that a library goes on without what it tried.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import struct
from collections.abc import Iterable

from mindie_mm.lockdown.system_calls import ARCHITECTURES, call, number_of

FREE = (
    # what decoding was seen to use, the descriptors of an item, and the socket
    *("read", "pread64", "readv", "lseek", "close", "recvmsg", "recvfrom", "fstat", "futex"),
    *("munmap", "mremap", "madvise", "brk", "clock_gettime", "clock_getres", "gettimeofday", "getrandom"),
    # waiting, signals, the end
    *("poll", "ppoll", "select", "pselect6", "nanosleep", "clock_nanosleep", "restart_syscall", "sched_yield"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "exit", "exit_group"),
    # what a process may know of itself and of the machine
    *("getpid", "gettid", "getcpu", "getrusage", "sched_getaffinity", "sysinfo"),
)
"""System calls that are allowed whatever their arguments are. `fstat` takes a descriptor and no path.

Calls that take a path are not among them. glibc 2.33 to 2.36 makes fstat() of newfstatat, which does, so `os.fstat`
fails there.
"""
SENDING = ("write", "writev", "sendmsg", "sendto")
"""System calls that are allowed on given descriptors alone."""

_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_GET_ACTION_AVAIL, _SET_MODE_FILTER = 2, 1
_SPEC_ALLOW = 4
"""Without this flag, kernels before 5.16 slow the process down, to guard it against what it runs itself (Spectre)."""
_X32 = 0x40000000
"""Bit of the numbers of x86-64's second interface, whose system calls would be compared with numbers of the first."""
_PROT_EXEC, _MAP_GROWSDOWN = 4, 0x100

Instructions = list[tuple[int, int, int, int]]
"""Each an operation, how many instructions to skip if a comparison is true, and if it is false, and an operand."""


def available() -> None:
    """Raise OSError if the kernel has no seccomp filters (ENOSYS, EINVAL), or if they are forbidden (EPERM)."""
    call("seccomp", _GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(_KILL)))


def allow_decoding(writable: Iterable[int]) -> None:
    """Forbid this thread and its children all system calls that decoding does not need, for good.

    The thread needs `no_new_privs`. A system call of another architecture ends the process.

    Args:
        writable: Descriptors that may be written to.

    Raises:
        OSError: As in `available`.

    """
    available()
    program = b"".join(struct.pack("=HBBI", *one) for one in filter_of(platform.machine(), writable, os.getpid()))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    for flags in (_SPEC_ALLOW, 0):
        try:
            call("seccomp", _SET_MODE_FILTER, flags, ctypes.c_char_p(header))
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:  # kernels before 4.17 do not know the flag
                raise
        else:
            return


def filter_of(machine: str, writable: Iterable[int], process: int) -> Instructions:
    """Return the filter for the process of that id, on a `machine` of `ARCHITECTURES`."""
    instructions = [
        _load(4),  # seccomp_data.arch
        *_unless_equal(ARCHITECTURES[machine], [_return(_KILL)]),
        _load(0),  # seccomp_data.nr
        *(_if_any_bit(_X32, [_return(_KILL)]) if machine == "x86_64" else []),
    ]
    allow, refuse = [_return(_ALLOW)], [_return(_REFUSE)]
    rules = dict.fromkeys(FREE, allow) | dict.fromkeys(SENDING, _one_of(0, writable))
    rules["tgkill"] = _one_of(0, [process])  # abort() signals its own thread
    rules["mprotect"] = [_argument(2), *_if_any_bit(_PROT_EXEC, refuse), *allow]
    # Memory that RLIMIT_DATA does not count is shared, or grows downwards like a stack.
    shared = _if_any_bit(mmap.MAP_SHARED, _if_any_bit(mmap.MAP_ANONYMOUS, refuse))
    flags = [_argument(3), *_if_any_bit(_MAP_GROWSDOWN, refuse), *shared]
    rules["mmap"] = [_argument(2), *_if_any_bit(_PROT_EXEC, refuse), *flags, *allow]
    # Its own limit of processor time may be set, and all limits may be read. Root could raise what has been lowered.
    reading = [_argument(2), *_if_equal(0, [_argument(2, high=True), *_if_equal(0, allow)])]
    limits = [_argument(1), *_if_equal(resource.RLIMIT_CPU, allow), *reading]
    rules["prlimit64"] = [_argument(0), *_if_equal(0, limits), *refuse]
    for name, rule in rules.items():
        if (number := number_of(name, machine)) is not None:
            instructions += _if_equal(number, rule)
    return [*instructions, *refuse]


def _one_of(argument: int, values: Iterable[int]) -> Instructions:
    """Allow the call if the lower half of its argument is one of `values`."""
    allowed = [one for value in values for one in _if_equal(value, [_return(_ALLOW)])]
    return [_argument(argument), *allowed, _return(_REFUSE)]


def _argument(place: int, *, high: bool = False) -> tuple[int, int, int, int]:
    """Load half of the argument at `place`. Both architectures are little-endian."""
    return _load(16 + 8 * place + 4 * high)


def _load(offset: int) -> tuple[int, int, int, int]:
    return 0x20, 0, 0, offset  # BPF_LD | BPF_W | BPF_ABS


def _if_equal(value: int, then: Instructions) -> Instructions:
    """Run `then` if the loaded word equals `value`. It may end in a return, or go on."""
    return [(0x15, 0, len(then), value), *then]  # BPF_JMP | BPF_JEQ | BPF_K


def _unless_equal(value: int, then: Instructions) -> Instructions:
    return [(0x15, len(then), 0, value), *then]


def _if_any_bit(bits: int, then: Instructions) -> Instructions:
    return [(0x45, 0, len(then), bits), *then]  # BPF_JMP | BPF_JSET | BPF_K


def _return(action: int) -> tuple[int, int, int, int]:
    return 0x06, 0, 0, action  # BPF_RET | BPF_K
