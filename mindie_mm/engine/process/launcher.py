"""The launcher of an engine with several ranks. It starts a process for each rank, and exits when they have exited.

All ranks inherit the channel to the parent, so the channel closes when the last rank has ended. Each rank also has its
own channel to the launcher, which ends the rank if the launcher is killed.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from mindie_mm.processes.ipc import ChildChannel, Lifeline, spawn

_log = logging.getLogger(__name__)

PATIENCE_S = 1.5
"""Time in seconds in which the ranks must end before they are killed. The parent waits longer for the launcher."""

_Rank = tuple[subprocess.Popen[bytes], socket.socket]


def main(channel: ChildChannel, lifeline: Lifeline, num_ranks: str, device: str, first_device: str) -> None:
    """Run the ranks until they end. If a rank fails, end the others and exit with status 1."""
    ranks = lifeline.hold(lambda: _start(channel, int(num_ranks), device, first_device), _close)
    numbers = {process.pid: number for number, (process, _) in enumerate(ranks)}
    with suppress(ChildProcessError):  # the parent is gone, and `_close` has reaped the ranks
        while numbers:
            pid, status = os.wait()
            number = numbers.pop(pid)
            if status:
                lifeline.end()  # if the parent is gone, `_close` has killed the rank, and this call exits the process
                _log.error("rank %d (process %d) exited with status %d", number, pid, os.waitstatus_to_exitcode(status))
                _close(ranks)
                sys.exit(1)


def _start(channel: ChildChannel, num_ranks: int, device: str, first_device: str) -> list[_Rank]:
    store = os.memfd_create("mindie_mm.ranks")  # this file has no path, so it cannot be left over
    descriptors = channel.fileno(), store
    return [
        spawn(
            "mindie_mm.engine.process.rank",
            *map(str, (number, num_ranks, device, first_device, *descriptors)),
            descriptors=descriptors,
        )
        for number in range(num_ranks)
    ]


def _close(ranks: list[_Rank]) -> None:
    """End the ranks by closing their channels, and kill ranks that do not end in time."""
    for _, connection in ranks:
        connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + PATIENCE_S
    for process, _ in ranks:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
