"""Points at which a test can kill a process. These points are not intended for users.

MINDIE_MM_FAULTS is the path of a folder with trigger files. A process that reaches a point unlinks the file
`<role>.<point>`, if it exists, and kills itself with SIGKILL. If several processes reach the point, only the process
that unlinks the file dies.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_armed: str | None = None
"""Path of this process's trigger files, without the name of the point. None outside tests."""


def arm(role: str, folder: Path | None) -> None:
    """Set the role of this process, such as `api`, `tokenizer` or `engine`, and the folder with trigger files.

    If the folder is None, points do nothing.
    """
    global _armed  # noqa: PLW0603 - if it is not armed, a point must cost only one check of a global
    _armed = None if folder is None else str(folder / f"{role}.")


def point(name: str) -> None:
    """Kill this process if a test has set a trigger for the point `name`."""
    if _armed is not None:
        _reach(_armed + name)


def _reach(trigger: str) -> None:
    try:
        os.unlink(trigger)  # noqa: PTH108 - do not create a path object for a file that usually does not exist
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
