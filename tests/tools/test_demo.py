"""The demo notices an arena that is left behind."""

from mindie_mm.shm import Arena
from tools.demo import arenas


def test_an_arena_that_is_left_is_seen() -> None:
    before = arenas()
    with Arena.create(1 << 20):
        assert len(arenas() - before) >= 1
