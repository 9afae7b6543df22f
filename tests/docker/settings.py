"""Functions that interpret the settings in the files of docker/."""

from __future__ import annotations

import dataclasses
import re

from mindie_mm.settings.sources import CLASSES, PARTS
from tests.docker.dockerfile import ROOT

VARIABLES = {f"MINDIE_MM_{field.name.upper()}" for cls in CLASSES for field in dataclasses.fields(cls)} - {
    f"MINDIE_MM_{part.upper()}" for part in PARTS
}
"""Names of the environment variables of all settings."""
PAGE = (ROOT / "docs/deploy.md").read_text()
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def nbytes(size: str) -> int:
    """Return a size such as 512m (Docker) or 512Mi (Kubernetes) in bytes."""
    parts = re.fullmatch(r"(\d+)([a-zA-Z]*)", size)
    assert parts is not None, size
    return int(parts[1]) * _UNITS[parts[2]]


def shm_bytes(arena_bytes: int) -> int:
    """Return the size in bytes that /dev/shm must have for an arena, according to docs/deploy.md."""
    (room,) = re.findall(r"/dev/shm must have room for\s+`--arena-bytes` and for\s+(\d+) MiB", PAGE)
    return arena_bytes + int(room) * 2**20
