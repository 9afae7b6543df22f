"""Fixtures of every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mindie_mm.shm import survey
from mindie_mm.shm.layout import SHM_DIRECTORY

pytest_plugins = ["tests.checkpoints"]

settings.register_profile("here", deadline=None)  # a busy machine makes no test wrong; pytest's own time limit holds
settings.load_profile("here")


@pytest.fixture(autouse=True)
def shared_memory_as_found() -> Iterator[None]:
    """/dev/shm after a test is as before it: no arena of the dead, or of this process; no segment of this user.

    Arenas of other living processes are theirs: a server that tests share may start a tokenizer at any time.
    """
    before = _leftovers()
    yield
    assert _leftovers() - before == set()


def _leftovers() -> set[str]:
    arenas = (arena for arena in survey() if not arena.alive or arena.owner is None or arena.owner.pid == os.getpid())
    return {arena.file for arena in arenas} | {str(path) for path in SHM_DIRECTORY.glob("psm_*") if _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
