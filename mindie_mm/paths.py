"""Paths as their caller means them: absolute from the moment at which they are taken.

A script may change its working directory at any time, as Hydra does, and another thread may do it. Worker processes
that are started again later begin in the new one.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindie_mm.errors import InputError


def working_directory() -> str:
    """Return the working directory; empty where it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - a text, which costs a tenth
    except FileNotFoundError:
        return ""


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return `path` as it is seen from the working directory. InputError for a relative one where that was removed."""
    path = Path(path)
    if path.is_absolute():
        return path
    if not (folder := working_directory()):
        raise InputError(f"{path} is a relative path, and the working directory was removed; give an absolute path")
    return Path(folder, path)
