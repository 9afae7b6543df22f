"""Places at which a test can kill a process: for tests alone, and nothing a user should set.

With MINDIE_MM_FAULTS naming a folder, the process of a role that reaches a point kills itself with SIGKILL if the
folder holds a file `<role>.<point>`. Whoever unlinks the file dies: one process, once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_armed: str | None = None
"""Path of the trigger files up to the point's name; None, as always outside tests: no point does anything."""


def arm(role: str, folder: Path | None) -> None:
    """Says which process this is: `api`, `tokenizer` or `engine`; in tests `batch`. Without a folder none is armed."""
    global _armed  # noqa: PLW0603 - a point must cost one test of a global
    _armed = None if folder is None else str(folder / f"{role}.")


def point(name: str) -> None:
    """Does nothing, or ends this process."""
    if _armed is not None:
        _reach(_armed + name)


def _reach(trigger: str) -> None:
    try:
        os.unlink(trigger)  # noqa: PTH108 - no path object for a file that is not there
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
