"""A separate /dev/shm for each parallel pytest process.

Tests inspect all of /dev/shm, kill owners of arenas and reclaim their memory, so concurrent tests must not share it.
Root may mount a separate /dev/shm. Other users may do so if the kernel permits user namespaces.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys

import pytest
import torch

from mindie_mm.shm.format.layout import SHM_DIRECTORY

_MOUNT = f"mount -t tmpfs tmpfs {SHM_DIRECTORY} && exec"
AS_ROOT = ("unshare", "--mount", "sh", "-c", f'{_MOUNT} "$@"', "sh")
# The process keeps its user id and drops all capabilities, because tests check whether they run as root.
AS_USER = (
    *("unshare", "--user", "--map-current-user", "--keep-caps", "--mount"),
    *("sh", "-c", f'{_MOUNT} setpriv --inh-caps=-all --ambient-caps=-all "$@"', "sh"),
)


@functools.cache
def prefix() -> tuple[str, ...] | None:
    """Return a command prefix that mounts a separate /dev/shm, or None if this user may not mount one."""
    command = AS_USER if os.geteuid() else AS_ROOT
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if tried.returncode else command


def pytest_xdist_auto_num_workers() -> int:
    """Make `-n auto` start one process per CPU, or no parallel processes if they would share /dev/shm."""
    return len(os.sched_getaffinity(0)) if prefix() else 0


def pytest_configure(config: pytest.Config) -> None:
    """Limit torch to one thread, and give each parallel process a separate /dev/shm. Child processes inherit both."""
    if "OMP_NUM_THREADS" not in os.environ:
        # A second thread for such small models would mostly wait, which takes as much processor time as computing.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    processes: list[str] = getattr(config.option, "tx", [])
    if {*processes} != {"popen"} or hasattr(config, "workerinput"):
        return  # there are no parallel processes, this is one of them, or --tx configures them
    command = prefix()
    if command is None:
        raise pytest.UsageError(
            f"-n needs a separate {SHM_DIRECTORY} for each process, which this user may not mount; leave out -n"
        )
    config.option.tx = [f"popen//python={shlex.join([*command, sys.executable])}"] * len(processes)
