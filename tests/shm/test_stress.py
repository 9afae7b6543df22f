"""A short version of `make stress`, in which slow readers must never accept mixed contents."""

from __future__ import annotations

from tools.shm_stress import Counts, stress

CYCLES = 8000
MAX_ROUNDS = 8
"""Limit of the rounds until every outcome has occurred. One round nearly always suffices, except on a busy machine."""


def test_a_verified_block_is_never_torn() -> None:
    """Blocks are freed and reused while eight readers are still copying them."""
    counts, num_rounds = Counts(0, 0, 0, 0, 0), 0
    while num_rounds < MAX_ROUNDS and not has_every_outcome(counts):
        counts += stress(CYCLES, readers=8, seed=num_rounds)
        num_rounds += 1
        assert counts.torn == 0
    assert counts.fresh + counts.stale + counts.stale_after_copy == num_rounds * CYCLES
    assert counts.fresh > num_rounds * CYCLES // 2
    assert has_every_outcome(counts), counts


def has_every_outcome(counts: Counts) -> bool:
    return min(counts.stale, counts.stale_after_copy, counts.mixed, counts.in_pieces) > 0
