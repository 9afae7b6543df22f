"""Tests that the demo detects arenas that have not been removed."""

from mindie_mm.shm import Arena
from tools.demo import arenas


def test_an_arena_that_is_left_behind_is_found() -> None:
    before = arenas()
    with Arena.create(1 << 20):
        assert len(arenas() - before) >= 1
