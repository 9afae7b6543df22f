"""Tests that a sandboxed process cannot perform certain acts: per mechanism, as root and as an ordinary user."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from functools import cache

import pytest

from mindie_mm.lockdown import landlock, support

NOBODY = 65534
USERS = [0, NOBODY] if os.getuid() == 0 else [os.getuid()]
EPERM = "PermissionError EPERM"
EACCES = "PermissionError EACCES"
STOPPED: dict[str, dict[str, str]] = {
    "read_a_file": {"seccomp": EPERM, "landlock": EACCES},
    "list_a_folder": {"seccomp": EPERM, "landlock": EACCES},
    "look_a_path_up": {"seccomp": EPERM},
    "make_a_file": {"seccomp": EPERM, "landlock": EACCES},
    "remove_a_file": {"seccomp": EPERM, "landlock": EACCES},
    "connect_by_tcp": {"seccomp": EPERM, "landlock": EACCES},
    "listen_on_tcp": {"seccomp": EPERM, "landlock": EACCES},
    "send_by_udp": {"seccomp": EPERM},
    "connect_to_an_abstract_socket": {"seccomp": EPERM, "landlock": EPERM},
    "connect_to_a_socket_by_path": {"seccomp": EPERM},
    "fork": {"seccomp": EPERM},
    "start_a_thread": {"seccomp": "RuntimeError can't start new thread"},
    "execute": {"seccomp": EPERM, "landlock": EACCES},
    "execute_from_memory": {"seccomp": EPERM},
    "write_to_a_received_descriptor": {"seccomp": EPERM, "limits": "OSError EFBIG"},
    "write_to_an_inherited_descriptor": {"seccomp": EPERM, "limits": "OSError EFBIG"},
    "grow_a_received_file": {"seccomp": EPERM, "limits": "OSError EFBIG"},
    "cut_a_received_file": {"seccomp": EPERM},
    "allocate_without_end": {"limits": "MemoryError"},
    "share_memory_without_end": {"seccomp": EPERM},
    "map_a_received_file": {"seccomp": EPERM},
    "map_read_only_memory": {"seccomp": EPERM},
    "map_memory_that_grows_downwards": {"seccomp": EPERM},
    "map_huge_pages": {"seccomp": EPERM},
    "keep_more_memory_by_protecting_it": {"seccomp": EPERM},
    "grow_a_page_of_its_stack": {"seccomp": EPERM},
    "page_out_memory": {"seccomp": EPERM},
    "raise_the_limit_of_time": {"seccomp": "ValueError not allowed to raise maximum limit"},
    "raise_the_limit_of_the_stack": {"seccomp": "ValueError not allowed to raise maximum limit"},
    "ignore_the_signal_of_a_limit": {"seccomp": EPERM},
    "block_the_signal_of_a_limit": {"seccomp": EPERM},
    "read_its_parents_clock": {"seccomp": EPERM},
    "read_the_resolution_of_its_parents_clock": {"seccomp": EPERM},
    "sleep_by_its_parents_clock": {"seccomp": EPERM},
    "read_its_parents_affinity": {"seccomp": EPERM},
    "read_its_parents_limits": {"seccomp": EPERM},
    "send_out_of_band": {"seccomp": EPERM},
    "peek_at_a_message": {"seccomp": EPERM},
    "send_a_descriptor": {"seccomp": EPERM},
    "signal_itself": {"seccomp": EPERM},
    "raise_the_limit_of_memory": {"seccomp": "ValueError not allowed to raise maximum limit"},
    "signal_its_parent": {"seccomp": EPERM, "landlock": EPERM},
    "trace_its_parent": {"seccomp": EPERM, "landlock": EPERM},
    "read_its_parents_memory": {"seccomp": EPERM, "landlock": EPERM},
    "map_executable_memory": {"seccomp": EPERM},
    "make_memory_executable": {"seccomp": EPERM},
}
"""For each act, the error with which each mechanism stops it if there is no other mechanism.

With all mechanisms, the error is that of seccomp, which is checked before a system call runs.
"""
NEEDED_ABI = {
    "connect_by_tcp": 4,
    "listen_on_tcp": 4,
    "connect_to_an_abstract_socket": 6,
    "signal_its_parent": 6,
}
"""First version of Landlock's ABI that can forbid an act."""
ON_X86 = ("call_by_the_second_interface", "call_as_another_architecture")
GUARDED = (
    *("trace_its_parent", "read_its_parents_memory", "raise_the_limit_of_memory", "raise_the_limit_of_the_stack"),
    *("map_huge_pages", "send_out_of_band"),
)
"""Acts that some machines forbid to all processes."""
CASES = [
    *((name, mechanism, outcome) for name, stops in STOPPED.items() for mechanism, outcome in stops.items()),
    *((name, "all", stops.get("seccomp", stops.get("limits"))) for name, stops in STOPPED.items()),
    *((name, "none", "ended" if name.startswith("execute") else "done") for name in STOPPED),
    *((name, mechanism, "SIGSYS") for name in ON_X86 for mechanism in ("seccomp", "all")),
    *(("make_every_other_call", mechanism, "done") for mechanism in ("seccomp", "all")),
    ("dump_its_core", "all", "SIGABRT"),
]


@cache
def outcomes(user: int) -> dict[tuple[str, str], dict[str, object]]:
    """Run all cases as `user` and return their outcomes. One process forks a child for each case."""
    pairs = [case[:2] for case in CASES]
    command = [sys.executable, "-m", "tests.lockdown.acts", str(user)]
    done = subprocess.run(command, input=json.dumps(pairs), check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return dict(zip(pairs, map(json.loads, done.stdout.splitlines()), strict=True))


def require(name: str, mechanism: str) -> None:
    """Skip a case if this machine lacks the mechanism or the interface."""
    found = support()
    if mechanism == "all" and found.missing:
        pytest.skip("; ".join(found.missing))
    for one in found.missing:
        if one.lower().startswith(mechanism):
            pytest.skip(one)
    if mechanism == "landlock" and landlock.abi() < NEEDED_ABI.get(name, 1):
        pytest.skip(f"this kernel has version {landlock.abi()} of Landlock's ABI; the act needs {NEEDED_ABI[name]}")
    if name in ON_X86 and os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has a second system call interface")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("name", "mechanism", "outcome"), CASES)
def test_each_act_is_stopped_by_its_mechanism(name, mechanism, outcome, user):
    require(name, mechanism)
    found = outcomes(user)[name, mechanism]
    if name in GUARDED and mechanism == "none" and found["outcome"] != outcome:
        pytest.skip(f"this machine forbids the act to all processes: {found['outcome']}")
    assert str(found["outcome"]).startswith(outcome)
    if mechanism == "all":
        assert (found["pages"], found["bytes"]) == ([0, 0, 0], 3 * mmap.PAGESIZE)
        assert "core dump" not in str(found["outcome"])


@pytest.mark.parametrize("user", USERS)
def test_without_a_lock_the_acts_reach_the_file(user):
    """Without a sandbox, the acts change the file.

    The other tests check that the file of a sandboxed process is unchanged.
    """
    grown = outcomes(user)["grow_a_received_file", "none"]
    assert grown["bytes"] == 2**20
    assert outcomes(user)["write_to_a_received_descriptor", "none"]["pages"] == [ord("a"), 0, 0]
    assert outcomes(user)["cut_a_received_file", "none"]["bytes"] == 0
