"""Removed arenas that processes still map. Their memory stays in use until the last mapping is gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path


def removed_arenas(pids: Collection[int], wait_s: float = 15.0) -> set[str]:
    """Wait up to `wait_s` seconds until none of the processes maps a removed arena. Return the remaining arenas."""
    deadline = time.monotonic() + wait_s
    while (found := _mapped(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # no event reports that another process has unmapped an arena
    return found


def _mapped(pids: Collection[int]) -> set[str]:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    return {name for line in lines for name in line.split(None, 5)[5:] if "mindie_mm-" in name and "(deleted)" in name}
