"""Tests that the demo detects arenas that have not been removed."""

from mindie_mm.shm import Arena
from tools.demo import arenas


def test_an_arena_that_is_left_behind_is_found() -> None:
    with Arena.create(1 << 20) as arena:
        assert arena.path.name in arenas()
    assert arena.path.name not in arenas()
