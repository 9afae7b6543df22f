"""Conversion of relative paths to absolute paths, at the time when the caller passes them.

A script may change its working directory at any time, as Hydra does. If a worker process is restarted after that, it
starts in the new directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindie_mm.errors import InputError


def working_directory() -> str:
    """Return the working directory, or "" if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - Path.cwd takes ten times as long
    except FileNotFoundError:
        return ""


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return `path`, resolved against the working directory if it is relative.

    Raises:
        InputError: The path is relative, and the working directory was removed.

    """
    path = Path(path)
    if path.is_absolute():
        return path
    if not (folder := working_directory()):
        raise InputError(f"{path} is a relative path, but the working directory was removed; give an absolute path")
    return Path(folder, path)
