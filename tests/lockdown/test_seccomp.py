"""Tests of the seccomp filters in a BPF interpreter. The kernel can only run the filter for its own architecture."""

from __future__ import annotations

import errno
import mmap
import re
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindie_mm.lockdown.seccomp import FREE, SENDING, filter_of
from mindie_mm.lockdown.system_calls import ARCHITECTURES, NUMBERS, number_of

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
WRITABLE, PROCESS = (4, 9), 1234
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
PRIVATE, SHARED, ANONYMOUS, GROWING = mmap.MAP_PRIVATE, mmap.MAP_SHARED, mmap.MAP_ANONYMOUS, 0x100
FAR = 2**63 + 1
"""A pointer whose lower half and upper half are both nonzero."""
WITH_ARGUMENTS: list[tuple[str, Sequence[int], bool]] = [
    *((name, [descriptor], descriptor in WRITABLE) for name in SENDING for descriptor in (0, 1, 2, 4, 5, 9)),
    ("tgkill", [PROCESS, PROCESS, 6], True),
    ("tgkill", [PROCESS + 1, PROCESS, 6], False),
    ("mprotect", [FAR, 4096, READ | WRITE], True),
    ("mprotect", [FAR, 4096, READ | EXECUTE], False),
    ("mprotect", [FAR, 4096, EXECUTE], False),
    ("mmap", [0, 4096, READ | WRITE, PRIVATE | ANONYMOUS, FAR], True),
    ("mmap", [0, 4096, READ | WRITE, SHARED, 3], True),
    ("mmap", [0, 4096, 0, PRIVATE | ANONYMOUS, 3], True),
    ("mmap", [0, 4096, READ | EXECUTE, PRIVATE, 3], False),
    ("mmap", [0, 4096, READ | WRITE, SHARED | ANONYMOUS, FAR], False),
    ("mmap", [0, 4096, READ | WRITE, PRIVATE | ANONYMOUS | GROWING, FAR], False),
    ("prlimit64", [0, resource.RLIMIT_CPU, FAR, 0], True),
    ("prlimit64", [0, resource.RLIMIT_STACK, 0, FAR], True),
    ("prlimit64", [0, resource.RLIMIT_DATA, FAR, 0], False),
    ("prlimit64", [0, resource.RLIMIT_DATA, 2**63, 0], False),
    ("prlimit64", [PROCESS + 1, resource.RLIMIT_CPU, FAR, 0], False),
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
    free = {number_of(name, machine) for name in FREE}
    listed = free | {number_of(name, machine) for name in (*SENDING, "mmap", "mprotect", "prlimit64", "tgkill")}
    for number in range(1024):
        if number in free:
            assert action(machine, number) == ALLOWED, number
        elif number not in listed:
            assert action(machine, number, [4, 0]) == REFUSED, number


@pytest.mark.parametrize(("name", "arguments", "allowed"), WITH_ARGUMENTS)
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_whether_a_call_is_allowed(machine, name, arguments, allowed):
    number = number_of(name, machine)
    assert number is not None
    assert action(machine, number, arguments) == (ALLOWED if allowed else REFUSED)


def test_calls_of_other_architectures_and_of_x32_kill_the_process():
    assert action("x86_64", 0, architecture="aarch64") == KILLED
    assert action("aarch64", 63, architecture="x86_64") == KILLED
    assert action("x86_64", 0x40000000 | 39) == KILLED


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_system_call_numbers_match_the_kernels_headers(machine, header):
    if not (path := Path(header)).exists():
        pytest.skip(f"the headers of the kernel are not installed: there is no {path}")
    found = {
        name: int(value) for name, value in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", path.read_text("utf-8"))
    }
    assert {name: number_of(name, machine) for name in NUMBERS} == {name: found.get(name) for name in NUMBERS}
