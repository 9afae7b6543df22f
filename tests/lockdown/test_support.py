"""Tests for the report on the sandbox if the kernel lacks a mechanism.

A seccomp filter of the test makes the system calls of a mechanism fail, as in an older kernel, after a boot without
Landlock or under a container's profile.
"""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindie_mm.lockdown import Locks, support

ALL = support()
PROCESS = """
import ctypes, json, os, platform, struct, sys
from mindie_mm.lockdown import lock_in, support
from mindie_mm.lockdown.system_calls import PR_SET_NO_NEW_PRIVS, call, number_of, prctl

name, number = sys.argv[1], int(sys.argv[2])
program = [(0x20, 0, 0, 0), (0x15, 0, 1, number_of(name, platform.machine())), (6, 0, 0, 0x50000 | number)]
program = b"".join(struct.pack("=HBBI", *one) for one in [*program, (6, 0, 0, 0x7FFF0000)])
code = ctypes.create_string_buffer(program, len(program))
prctl(PR_SET_NO_NEW_PRIVS, 1)
call("seccomp", 1, 0, ctypes.c_char_p(struct.pack("@HP", len(program) // 8, ctypes.addressof(code))))
found, held = support(), lock_in([1])
try:
    os.stat("/")
    calls = "made"
except PermissionError:
    calls = "refused"
try:
    open("/etc/passwd")
    files = "opened"
except PermissionError:
    files = "refused"
print(json.dumps([found.held, found.missing, held == found, calls, files]))
"""


def lacking(name: str, number: int) -> tuple[Locks, bool, str, str]:
    """Return the report of a process in which the system call `name` fails with errno `number`."""
    command = [sys.executable, "-c", PROCESS, name, str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    held, missing, same, calls, files = json.loads(done.stdout)
    return Locks(tuple(held), tuple(missing)), same, calls, files


@pytest.mark.skipif(bool(ALL.missing), reason="; ".join(ALL.missing))
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSYS, "this kernel does not support it"),
        (errno.EOPNOTSUPP, "it is disabled at boot"),
        (errno.EPERM, "the container forbids it"),
    ],
)
def test_without_landlock_the_other_locks_stay(number, reason):
    locks, same, calls, files = lacking("landlock_create_ruleset", number)
    assert str(locks) == f"decoders are sandboxed by seccomp and resource limits; Landlock is missing: {reason}"
    assert (same, calls, files) == (True, "refused", "refused")


@pytest.mark.skipif(bool(ALL.missing), reason="; ".join(ALL.missing))
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_without_seccomp_the_other_locks_stay(number):
    locks, same, calls, files = lacking("seccomp", number)
    assert str(locks).startswith("decoders are sandboxed by Landlock (ABI ")
    assert "and resource limits; seccomp is missing: " in str(locks)
    assert (same, calls, files) == (True, "made", "refused")


def test_the_report_says_when_resource_limits_are_the_only_lock():
    assert str(Locks(("resource limits",), ("a", "b"))) == "decoders are sandboxed by resource limits only; a; b"


def test_the_kernel_confirms_the_locks():
    script = "from mindie_mm.lockdown import lock_in; print(lock_in([0, 1], 2**30), flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == str(ALL)
        folder = Path(f"/proc/{process.pid}")
        status = dict(line.split(":\t", 1) for line in folder.joinpath("status").read_text("utf-8").splitlines())
        limits = folder.joinpath("limits").read_text("utf-8")
        process.communicate("\n")
    assert {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == ("0" if any("seccomp" in one for one in ALL.missing) else "2")
    assert re.search(r"Max core file size +0 +0 ", limits)
    assert re.search(r"Max file size +0 +0 ", limits)
    assert re.search(r"Max stack size +(\d+) +\1 ", limits)
    data = int(re.search(r"Max data size +(\d+) +\1 ", limits)[1])
    assert 2**30 < data < 2**30 + 2**28


def test_support_does_not_lock_the_process():
    before = locks_of_this_process()
    assert support() == ALL
    assert locks_of_this_process() == before


def locks_of_this_process() -> list[str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(("NoNewPrivs:", "Seccomp"))]
