"""What a request costs the processes of a service, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Watched:
    """Processes whose memory is watched."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._folders = [Path(f"/proc/{pid}") for pid in pids]

    def during(self, work: Callable[[], T]) -> tuple[T, float, int]:
        """What `work` gives, the seconds that it took, and the bytes by which the processes grew at most."""
        for folder in self._folders:
            (folder / "clear_refs").write_text("5")  # the peak starts anew
        before = [self._bytes(folder, "VmRSS") for folder in self._folders]
        started = time.monotonic()
        result = work()
        seconds = time.monotonic() - started
        peaks = [self._bytes(folder, "VmHWM") for folder in self._folders]
        return result, seconds, sum(peak - least for peak, least in zip(peaks, before, strict=True))

    @staticmethod
    def _bytes(folder: Path, name: str) -> int:
        lines = (folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
