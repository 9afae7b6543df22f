"""Processor time, which a test may bound: other programs on the machine add nothing to it, as they do to time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that the process `pid` and all that it started have used.

    Those that have ended count, where their parent waited for them. The kernel counts in steps of 10 ms.
    """
    while True:
        process = psutil.Process(pid)
        try:
            used = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        except psutil.NoSuchProcess:
            continue  # ended meanwhile, its time is its parent's
        return float(sum(one.user + one.system + one.children_user + one.children_system for one in used))


@contextmanager
def processor_time_below(limit_s: float) -> Iterator[None]:
    """Hold what this process does in the block to so many seconds of processor time."""
    started_s = time.process_time()
    yield
    used_s = time.process_time() - started_s
    assert used_s < limit_s
