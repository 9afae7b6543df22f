"""A /dev/shm of its own for each of several pytest processes.

Tests look at all of /dev/shm, kill owners of arenas and collect what they leave, so two tests at once must not meet
there. Root may mount another one; another user may where the kernel permits user namespaces.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys

import pytest

from mindie_mm.shm.layout import SHM_DIRECTORY

_MOUNT = f"mount -t tmpfs tmpfs {SHM_DIRECTORY} && exec"
AS_ROOT = ("unshare", "--mount", "sh", "-c", f'{_MOUNT} "$@"', "sh")
# The user stays who they are, and keeps no capability: tests see whether they run as root.
AS_USER = (
    *("unshare", "--user", "--map-current-user", "--keep-caps", "--mount"),
    *("sh", "-c", f'{_MOUNT} setpriv --inh-caps=-all --ambient-caps=-all "$@"', "sh"),
)


@functools.cache
def prefix() -> tuple[str, ...] | None:
    """Return what runs a command with a /dev/shm of its own, or None where this user may not mount one."""
    command = AS_USER if os.geteuid() else AS_ROOT
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if tried.returncode else command


def pytest_xdist_auto_num_workers() -> int:
    """Have `-n auto` start a process a core, or none where two could not run side by side."""
    return len(os.sched_getaffinity(0)) if prefix() else 0


def pytest_configure(config: pytest.Config) -> None:
    """Start each of several processes with a /dev/shm of its own."""
    processes: list[str] = getattr(config.option, "tx", [])
    if {*processes} != {"popen"} or hasattr(config, "workerinput"):
        return  # there is one, or where they run is said
    command = prefix()
    if command is None:
        raise pytest.UsageError(
            f"-n needs a {SHM_DIRECTORY} for each process, and this user may mount none: leave it out"
        )
    config.option.tx = [f"popen//python={shlex.join([*command, sys.executable])}"] * len(processes)
