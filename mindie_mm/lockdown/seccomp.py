"""Seccomp filter that allows only the system calls that a decoder needs. All other calls fail with EPERM.

The filter is a classic BPF program (docs.kernel.org/userspace-api/seccomp_filter.html). A forbidden call fails but
does not kill the process, so that a library can continue if the call is optional.
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
    # for decoding, for the descriptors of an item, and for the socket
    *("read", "pread64", "readv", "lseek", "close", "recvmsg", "recvfrom", "fstat", "futex"),
    *("munmap", "mremap", "madvise", "brk", "clock_gettime", "clock_getres", "gettimeofday", "getrandom"),
    # for waiting, signals and exit
    *("poll", "ppoll", "select", "pselect6", "nanosleep", "clock_nanosleep", "restart_syscall", "sched_yield"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "exit", "exit_group"),
    # for information about the process and the machine
    *("getpid", "gettid", "getcpu", "getrusage", "sched_getaffinity", "sysinfo"),
)
"""System calls that are allowed with any arguments.

None of these calls has a path argument. glibc 2.33 to 2.36 implements fstat() with newfstatat, which has a path
argument and is therefore forbidden. `os.fstat` fails with these versions.
"""
SENDING = ("write", "writev", "sendmsg", "sendto")
"""System calls that are allowed only for the descriptors that the caller lists."""

_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_GET_ACTION_AVAIL, _SET_MODE_FILTER = 2, 1
_SPEC_ALLOW = 4
"""Flag that prevents kernels before 5.16 from enabling Spectre mitigations, which would slow down the process."""
_X32 = 0x40000000
"""Bit that is set in the system call numbers of the x32 ABI. The x86-64 numbers in the filter do not apply to x32."""
_PROT_EXEC, _MAP_GROWSDOWN = 4, 0x100

Instructions = list[tuple[int, int, int, int]]
"""BPF instructions: operation code, instructions to skip if true, instructions to skip if false, operand."""


def available() -> None:
    """Raise OSError if the kernel does not support seccomp filters (ENOSYS, EINVAL) or forbids them (EPERM)."""
    call("seccomp", _GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(_KILL)))


def allow_decoding(writable: Iterable[int]) -> None:
    """Permanently forbid all system calls that decoding does not need, for this thread and its children.

    The thread must have set `no_new_privs`. A system call through the ABI of another architecture kills the process.

    Args:
        writable: Descriptors that may be written to.

    Raises:
        OSError: In the same cases as `available`.

    """
    available()
    program = b"".join(struct.pack("=HBBI", *one) for one in filter_of(platform.machine(), writable, os.getpid()))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    for flags in (_SPEC_ALLOW, 0):
        try:
            call("seccomp", _SET_MODE_FILTER, flags, ctypes.c_char_p(header))
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:  # kernels before 4.17 do not support the flag
                raise
        else:
            return


def filter_of(machine: str, writable: Iterable[int], process: int) -> Instructions:
    """Return the filter of a decoder.

    Args:
        machine: Architecture, a key of `ARCHITECTURES`.
        writable: Descriptors that may be written to.
        process: Process id of the decoder.

    Returns:
        The instructions of the BPF program.

    """
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
    # RLIMIT_DATA does not count shared memory, or mappings that grow downwards like a stack.
    shared = _if_any_bit(mmap.MAP_SHARED, _if_any_bit(mmap.MAP_ANONYMOUS, refuse))
    flags = [_argument(3), *_if_any_bit(_MAP_GROWSDOWN, refuse), *shared]
    rules["mmap"] = [_argument(2), *_if_any_bit(_PROT_EXEC, refuse), *flags, *allow]
    # A decoder may read all of its limits, but set only the limit of its CPU time. A decoder that runs as root could
    # otherwise raise the other limits.
    reading = [_argument(2), *_if_equal(0, [_argument(2, high=True), *_if_equal(0, allow)])]
    limits = [_argument(1), *_if_equal(resource.RLIMIT_CPU, allow), *reading]
    rules["prlimit64"] = [_argument(0), *_if_equal(0, limits), *refuse]
    for name, rule in rules.items():
        if (number := number_of(name, machine)) is not None:
            instructions += _if_equal(number, rule)
    return [*instructions, *refuse]


def _one_of(argument: int, values: Iterable[int]) -> Instructions:
    """Allow the call if the lower 32 bits of the argument number `argument` equal one of `values`."""
    allowed = [one for value in values for one in _if_equal(value, [_return(_ALLOW)])]
    return [_argument(argument), *allowed, _return(_REFUSE)]


def _argument(place: int, *, high: bool = False) -> tuple[int, int, int, int]:
    """Load the lower or the upper 32 bits of the argument number `place`. Both architectures are little-endian."""
    return _load(16 + 8 * place + 4 * high)


def _load(offset: int) -> tuple[int, int, int, int]:
    return 0x20, 0, 0, offset  # BPF_LD | BPF_W | BPF_ABS


def _if_equal(value: int, then: Instructions) -> Instructions:
    """Run `then` if the loaded value equals `value`. If `then` does not return, the instructions after it run next."""
    return [(0x15, 0, len(then), value), *then]  # BPF_JMP | BPF_JEQ | BPF_K


def _unless_equal(value: int, then: Instructions) -> Instructions:
    return [(0x15, len(then), 0, value), *then]


def _if_any_bit(bits: int, then: Instructions) -> Instructions:
    return [(0x45, 0, len(then), bits), *then]  # BPF_JMP | BPF_JSET | BPF_K


def _return(action: int) -> tuple[int, int, int, int]:
    return 0x06, 0, 0, action  # BPF_RET | BPF_K
