"""A short version of `make stress`, in which slow readers must never accept mixed contents."""

from __future__ import annotations

from tools.shm_stress import stress

CYCLES = 8000


def test_a_verified_block_is_never_torn() -> None:
    """Blocks are freed and reused while eight readers are still copying them."""
    counts = stress(CYCLES, readers=8)
    assert counts.torn == 0
    assert counts.fresh + counts.stale + counts.stale_after_copy == CYCLES
    assert counts.fresh > CYCLES // 2
    assert min(counts.stale, counts.stale_after_copy, counts.mixed, counts.in_pieces) > 0, "every outcome must occur"
