"""A slow reader never takes half of two contents for one: a slice of `make stress`."""

from __future__ import annotations

from tools.shm_stress import stress

CYCLES = 8000


def test_what_verifies_is_whole() -> None:
    """Blocks are freed and their bytes used again while eight readers still copy them."""
    counts = stress(CYCLES, readers=8)
    assert counts.torn == 0
    assert counts.fresh + counts.stale + counts.stale_after_copy == CYCLES
    assert counts.fresh > CYCLES // 2
    assert min(counts.stale, counts.stale_after_copy, counts.mixed, counts.in_pieces) > 0, "it does not stress"
