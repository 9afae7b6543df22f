"""Points at which a test can kill a process. Users should never set them.

MINDIE_MM_FAULTS names a folder of trigger files. A process that reaches a point unlinks the file `<role>.<point>` and
kills itself with SIGKILL. If several processes reach the point, only the one that unlinks the file dies.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_armed: str | None = None
"""Path of the trigger files without the point's name. None outside tests, where points do nothing."""


def arm(role: str, folder: Path | None) -> None:
    """Set the role of this process: `api`, `tokenizer` or `engine`, or `batch` in tests.

    Without a folder, points do nothing.
    """
    global _armed  # noqa: PLW0603 - a point must cost one test of a global
    _armed = None if folder is None else str(folder / f"{role}.")


def point(name: str) -> None:
    """Kill this process if a test has set a trigger for the point `name`."""
    if _armed is not None:
        _reach(_armed + name)


def _reach(trigger: str) -> None:
    try:
        os.unlink(trigger)  # noqa: PTH108 - no path object for a file that is not there
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
