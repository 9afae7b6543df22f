"""The engine process of several ranks: starts a process for each, and ends with them.

All ranks inherit the channel to the parent, so the parent hears of their end when the last one is gone. Each rank has a
channel of its own to this process, which is its lifeline should this process be killed.
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
"""How long the ranks may take to end by themselves; less than the parent's patience with this process."""

_Rank = tuple[subprocess.Popen[bytes], socket.socket]


def main(channel: ChildChannel, lifeline: Lifeline, num_ranks: str, device: str) -> None:
    """Run the ranks until they end, and end this process with status 1 if one of them fails."""
    ranks = lifeline.hold(lambda: _start(channel, int(num_ranks), device), _end)
    numbers = {process.pid: number for number, (process, _) in enumerate(ranks)}
    with suppress(ChildProcessError):  # `_end` has reaped them, because the parent is gone
        while numbers:
            pid, status = os.wait()
            number = numbers.pop(pid)
            if status:
                lifeline.end()  # does not return if the parent is gone, which is why the rank was killed
                _log.error("rank %d, process %d, ended with status %d", number, pid, os.waitstatus_to_exitcode(status))
                _end(ranks)
                sys.exit(1)


def _start(channel: ChildChannel, num_ranks: int, device: str) -> list[_Rank]:
    store = os.memfd_create("mindie_mm.ranks")  # has no name, so nothing of it can be left
    descriptors = channel.fileno(), store
    return [
        spawn(
            "mindie_mm.engine.process.rank",
            *map(str, (number, num_ranks, device, *descriptors)),
            descriptors=descriptors,
        )
        for number in range(num_ranks)
    ]


def _end(ranks: list[_Rank]) -> None:
    """End the ranks, by their lifelines or by force, so that none outlives this process."""
    for _, connection in ranks:
        connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + PATIENCE_S
    for process, _ in ranks:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
