"""Measures how much CPU time and memory the processes of a service need for a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from tests.processor_time import processor_s

T = TypeVar("T")


class Watched:
    """Monitor of the CPU time and memory of a process. `with_children` includes the memory of its children."""

    def __init__(self, pid: int, *, with_children: bool = False) -> None:
        self.pid = pid
        children = psutil.Process(pid).children() if with_children else []
        self._folders = [Path(f"/proc/{one}") for one in (pid, *(child.pid for child in children))]

    def during(self, work: Callable[[], T]) -> tuple[T, float, int]:
        """Run `work`. Return its result, the CPU time in seconds, and the peak growth of memory in bytes.

        The CPU time includes all descendants of the process.
        """
        for folder in self._folders:
            (folder / "clear_refs").write_text("5")  # resets the peak memory (VmHWM)
        before = [self._bytes(folder, "VmRSS") for folder in self._folders]
        started_s = processor_s(self.pid)
        result = work()
        used_s = processor_s(self.pid) - started_s
        peaks = [self._bytes(folder, "VmHWM") for folder in self._folders]
        return result, used_s, sum(peak - least for peak, least in zip(peaks, before, strict=True))

    @staticmethod
    def _bytes(folder: Path, name: str) -> int:
        lines = (folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
