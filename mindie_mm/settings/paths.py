"""Conversion of relative paths to absolute paths, at the time when the caller passes them.

A script may change its working directory at any time, as Hydra does. If a worker process is restarted after that, it
starts in the new directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindie_mm.errors import InputError

_MAX_SHOWN = 200


def working_directory() -> str:
    """Return the working directory, or "" if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - Path.cwd takes ten times as long
    except FileNotFoundError:
        return ""


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return `path`, resolved against the working directory if it is relative.

    Raises:
        InputError: The path is not a path that a file can have, or it is relative and the working directory was
            removed.

    """
    try:
        path = Path(path)
        name = os.fsencode(path)
    except (TypeError, ValueError):
        shown = ascii(path)[:_MAX_SHOWN] if isinstance(path, str) else f"a {type(path).__name__}"
        raise InputError(f"the path is {shown}; it must be a string or a pathlib.Path") from None
    if b"\0" in name:
        raise InputError(f"the path {ascii(str(path))[:_MAX_SHOWN]} has a null character, which no path can have")
    if path.is_absolute():
        return path
    if not (folder := working_directory()):
        raise InputError(f"{path} is a relative path, but the working directory was removed; give an absolute path")
    return Path(folder, path)
