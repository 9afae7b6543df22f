"""Seccomp filter that allows only the system calls in `allowed_calls.py`. All other calls fail with EPERM.

The filter is a classic BPF program (docs.kernel.org/userspace-api/seccomp_filter.html). A forbidden call fails but
does not kill the process, so that a library can continue if the call is optional.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

from mindie_mm.lockdown.allowed_calls import Argument, allowed_calls
from mindie_mm.lockdown.system_calls import ARCHITECTURES, call, number_of

_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_GET_ACTION_AVAIL, _SET_MODE_FILTER = 2, 1
_SPEC_ALLOW = 4
"""Flag that prevents kernels before 5.16 from enabling Spectre mitigations, which would slow down the process."""
_X32 = 0x40000000
"""Bit that is set in the system call numbers of the x32 ABI. The x86-64 numbers in the filter do not apply to x32."""

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
    for name, allowed in allowed_calls(writable, process).items():
        checks = [check for argument in allowed.arguments for check in _refuse_unless(argument)]
        instructions += _if_equal(number_of(name, machine), [*checks, _return(_ALLOW)])
    return [*instructions, _return(_REFUSE)]


def _refuse_unless(argument: Argument) -> Instructions:
    """Refuse the call unless the argument has one of its values. Otherwise, the instructions after this run next."""
    left = len(argument.values)
    compare = [(0x15, left - index, 0, value) for index, value in enumerate(argument.values)]  # BPF_JMP | BPF_JEQ
    checks = [_argument(argument.place), *compare, _return(_REFUSE)]
    if argument.is_pointer:
        checks += [_argument(argument.place, high=True), *_unless_equal(0, [_return(_REFUSE)])]
    return checks


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
