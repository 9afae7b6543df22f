"""Tests for the seccomp filters in a BPF interpreter. The kernel can only run the filter for its own architecture."""

from __future__ import annotations

import errno
import mmap
import re
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindie_mm.lockdown.allowed_calls import allowed_calls
from mindie_mm.lockdown.seccomp import filter_of
from mindie_mm.lockdown.system_calls import ARCHITECTURES, NUMBERS, number_of

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
WRITABLE, PROCESS = (4, 9), 1234
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
PRIVATE, SHARED, ANONYMOUS = mmap.MAP_PRIVATE, mmap.MAP_SHARED, mmap.MAP_ANONYMOUS
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
MAPPING_FLAGS = (0x100, 0x10, 0x100000, 0x2000, 0x8000, 0x40000)
"""MAP_GROWSDOWN, MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_LOCKED, MAP_POPULATE and MAP_HUGETLB."""
MSG_OOB, MSG_PEEK = 1, 2
SENDING, CLOCKS = ("sendto", "write", "writev"), ("clock_gettime", "clock_getres", "clock_nanosleep")
OF_A_PROCESS = 2**32 + (~PROCESS << 3 | 2)
"""Number of the clock of a process's processor time, as an unsigned number of 32 bits."""
FAR = 2**63 + 1
"""A pointer whose lower half and upper half are both nonzero."""
WITHOUT_ARGUMENTS = {
    *("read", "pread64", "lseek", "fstat", "close", "brk", "munmap", "sched_yield", "nanosleep", "restart_syscall"),
    *("gettimeofday", "getrandom", "getpid", "gettid", "exit", "exit_group", "getrusage", "getcpu", "sysinfo"),
}
"""System calls that reach nothing of other processes, whatever their arguments are."""
WITH_ARGUMENTS: list[tuple[str, Sequence[int], bool]] = [
    *((name, [descriptor], descriptor in WRITABLE) for name in SENDING for descriptor in (0, 1, 2, 4, 5, 9)),
    *(("sendto", [4, FAR, 1, flags], flags == 0) for flags in (0, MSG_OOB, MSG_PEEK)),
    *(("recvfrom", [4, FAR, 1, flags], flags == 0) for flags in (0, MSG_OOB, MSG_PEEK)),
    *(("recvmsg", [4, FAR, flags], flags == 0) for flags in (0, MSG_OOB, MSG_PEEK)),
    ("tgkill", [PROCESS, PROCESS, signal.SIGABRT], True),
    ("tgkill", [PROCESS, PROCESS, signal.SIGSTOP], False),
    ("tgkill", [PROCESS + 1, PROCESS, signal.SIGABRT], False),
    ("rt_sigprocmask", [signal.SIG_UNBLOCK, FAR, 0, 8], True),
    ("rt_sigprocmask", [signal.SIG_BLOCK, FAR, 0, 8], False),
    ("rt_sigprocmask", [signal.SIG_SETMASK, FAR, 0, 8], False),
    ("mprotect", [FAR, 4096, READ | WRITE], True),
    ("mprotect", [FAR, 4096, READ | WRITE | 0x1000000], False),
    *(("mprotect", [FAR, 4096, flags], False) for flags in (0, READ, EXECUTE, READ | EXECUTE, READ | WRITE | EXECUTE)),
    ("mmap", [0, 4096, READ | WRITE, PRIVATE | ANONYMOUS, FAR], True),
    ("mmap", [0, 4096, 0, PRIVATE | ANONYMOUS | 0x4000, FAR], True),
    ("mmap", [0, 4096, READ, PRIVATE | ANONYMOUS, FAR], False),
    ("mmap", [0, 4096, READ | WRITE, SHARED, 3], False),
    ("mmap", [0, 4096, READ | WRITE, PRIVATE, 3], False),
    ("mmap", [0, 4096, READ | EXECUTE, PRIVATE | ANONYMOUS, FAR], False),
    ("mmap", [0, 4096, READ | WRITE, SHARED | ANONYMOUS, FAR], False),
    *(("mmap", [0, 4096, READ | WRITE, PRIVATE | ANONYMOUS | flags, FAR], False) for flags in MAPPING_FLAGS),
    *(("madvise", [FAR, 4096, advice], advice in (4, 8, 14)) for advice in range(26)),
    *(("futex", [FAR, command | 128], command in (0, 1, 9, 10)) for command in range(16)),
    *((name, [clock], clock in range(8)) for name in CLOCKS for clock in (*range(12), 2**32 - 1, OF_A_PROCESS)),
    ("sched_getaffinity", [0, 8, FAR], True),
    ("sched_getaffinity", [PROCESS, 8, FAR], True),
    ("sched_getaffinity", [PROCESS + 1, 8, FAR], False),
    ("prlimit64", [0, resource.RLIMIT_STACK, 0, FAR], True),
    ("prlimit64", [PROCESS, resource.RLIMIT_STACK, 0, FAR], True),
    *(("prlimit64", [0, limit, FAR, 0], False) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_DATA)),
    ("prlimit64", [0, resource.RLIMIT_DATA, 2**63, 0], False),
    ("prlimit64", [PROCESS + 1, resource.RLIMIT_CPU, 0, FAR], False),
]


def action(machine: str, number: int, arguments: Sequence[int] = (), architecture: str = "") -> int:
    """Return what the filter for `machine` does with a system call of `architecture`."""
    words = [number, ARCHITECTURES[architecture or machine], 0, 0]
    for argument in [*arguments, *[0] * 6][:6]:
        words += [argument % 2**32, argument >> 32]
    loaded, at, program = 0, 0, filter_of(machine, WRITABLE, PROCESS)
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        if operation == 0x20:
            loaded = words[operand // 4]
        elif operation == 0x06:
            return operand
        else:
            truth = {0x15: loaded == operand, 0x45: bool(loaded & operand)}[operation]
            at += if_true if truth else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_that_are_not_listed_are_refused(machine):
    calls = {number_of(name, machine): allowed for name, allowed in allowed_calls(WRITABLE, PROCESS).items()}
    for number in range(1024):
        if number not in calls:
            assert action(machine, number, [4, 0]) == REFUSED, number
        elif not calls[number].arguments:
            assert action(machine, number) == ALLOWED, number


def test_each_allowed_call_has_a_reason_and_is_known_to_this_test():
    """A new system call needs a reason and, if its arguments matter, values for them and lines in `WITH_ARGUMENTS`."""
    calls = allowed_calls(WRITABLE, PROCESS)
    assert all(len(allowed.reason) > 3 for allowed in calls.values())
    assert {name for name, allowed in calls.items() if allowed.arguments} == {name for name, _, _ in WITH_ARGUMENTS}
    assert {name for name, allowed in calls.items() if not allowed.arguments} == WITHOUT_ARGUMENTS


@pytest.mark.parametrize(("name", "arguments", "allowed"), WITH_ARGUMENTS)
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_whether_a_call_is_allowed(machine, name, arguments, allowed):
    assert action(machine, number_of(name, machine), arguments) == (ALLOWED if allowed else REFUSED)


def test_calls_of_other_architectures_and_of_x32_kill_the_process():
    assert action("x86_64", 0, architecture="aarch64") == KILLED
    assert action("aarch64", 63, architecture="x86_64") == KILLED
    assert action("x86_64", 0x40000000 | 39) == KILLED


def test_system_call_numbers_of_x86_64_match_the_kernels_header():
    if not HEADER.exists():
        pytest.skip(f"the headers of the kernel are not installed: there is no {HEADER}")
    found = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text("utf-8")))
    assert {name: str(number_of(name, "x86_64")) for name in NUMBERS} == {name: found.get(name) for name in NUMBERS}


def test_system_call_numbers_of_aarch64_match_the_kernels_header():
    lines = Path(__file__).with_name("system_calls_aarch64.txt").read_text("utf-8").splitlines()
    found = {name: number for number, name in map(str.split, lines[1:])}
    assert {name: str(number_of(name, "aarch64")) for name in NUMBERS} == {name: found.get(name) for name in NUMBERS}
