"""The Python interpreter that runs worker processes."""

from __future__ import annotations

import os
import sys

from mindie_mm.errors import ProcessDied

_RUNNING = "/proc/self/exe"


def interpreter() -> str:
    """Return the path of this process's Python.

    Raises:
        ProcessDied: The path is unknown, or it is a frozen application, which would start itself again.

    """
    if not sys.executable:
        raise ProcessDied(
            f"no worker process can be started: sys.executable is {sys.executable!r}, as in some programs that "
            "embed Python. Set sys.executable to the path of this environment's Python interpreter"
        )
    if getattr(sys, "frozen", False) and _is_running(sys.executable):
        raise ProcessDied(
            f"no worker process can be started: sys.executable ({sys.executable}) is a frozen application, as "
            "PyInstaller makes them, which would start itself again. Set sys.executable to the path of a Python "
            "interpreter in whose environment mindie_mm is installed, or run the application without freezing it"
        )
    return sys.executable


def _is_running(path: str) -> bool:
    """Return whether this process runs the program at `path`, or whether this is unknown."""
    try:
        return os.path.samefile(path, _RUNNING)  # noqa: PTH121 - as fast for a path that is a string
    except OSError:
        return True
