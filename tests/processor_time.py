"""Processor time, which a test may bound: other programs on the machine add nothing to it, as they do to time."""

from __future__ import annotations

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
