"""CPU time for limits in tests. Unlike wall-clock time, it does not depend on the machine's other programs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def processor_s(pid: int) -> float:
    """Return the CPU time in seconds that the process `pid` and its descendants have used.

    Processes that have ended are included if their parent has waited for them. The kernel's resolution is 10 ms.
    """
    while True:
        process = psutil.Process(pid)
        try:
            used = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        except psutil.NoSuchProcess:
            continue  # a child has ended; its CPU time moves to its parent, so measure again
        return float(sum(one.user + one.system + one.children_user + one.children_system for one in used))


@contextmanager
def processor_time_below(limit_s: float) -> Iterator[None]:
    """Assert that the block uses less than `limit_s` seconds of this process's CPU time."""
    started_s = time.process_time()
    yield
    used_s = time.process_time() - started_s
    assert used_s < limit_s
