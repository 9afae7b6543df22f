"""The choice of an engine, by content and by load."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from mindie_mm.routing import Candidate, Content, HeldContent, order

CANDIDATES = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 100), st.integers(0, 100)),
    max_size=6,
    unique_by=lambda candidate: candidate.name,
)


def test_a_request_goes_to_the_engine_that_holds_its_content() -> None:
    candidates = [Candidate("a", 0, 0), Candidate("b", 90, 40), Candidate("c", 90, 30)]
    assert order(candidates, surplus_tokens=100) == [1, 2, 0]


def test_an_engine_above_the_surplus_comes_last() -> None:
    candidates = [Candidate("a", 300, 40), Candidate("b", 10, 0), Candidate("c", 20, 0), Candidate("d", 200, 0)]
    assert order(candidates, surplus_tokens=100) == [1, 2, 3, 0]
    assert order(candidates, surplus_tokens=290) == [0, 1, 2, 3]


def test_new_content_goes_to_the_least_loaded_engine() -> None:
    candidates = [Candidate("a", 3, 0), Candidate("b", 1, 0), Candidate("c", 2, 0)]
    assert order(candidates, surplus_tokens=100) == [1, 2, 0]


@given(CANDIDATES, st.binary(max_size=8), st.booleans())
def test_the_order_does_not_depend_on_the_order_of_the_candidates(
    candidates: list[Candidate], key: bytes, spread: bool
) -> None:
    expected = [candidates[index] for index in order(candidates, 50, key, spread=spread)]
    assert len(expected) == len(candidates)
    for first in permutations(candidates[:4]):
        shuffled = [*first, *candidates[4:]]
        assert [shuffled[index] for index in order(shuffled, 50, key, spread=spread)] == expected


def test_a_lost_engine_moves_only_its_own_content() -> None:
    candidates = [Candidate(name, 0, 0) for name in "abcde"]
    homes = {key: candidates[order(candidates, 0, b"%d" % key, spread=False)[0]].name for key in range(1000)}
    assert all(150 < [*homes.values()].count(name) < 250 for name in "abcde")
    left = candidates[1:]
    moved = {key: left[order(left, 0, b"%d" % key, spread=False)[0]].name for key in range(1000)}
    assert all(moved[key] == home for key, home in homes.items() if home != "a")


def test_small_differences_of_load_do_not_move_new_content_between_routers() -> None:
    idle = [Candidate("a", 0, 0), Candidate("b", 0, 0)]
    for key in range(20):
        first = order(idle, 10, b"%d" % key, spread=False)
        busy = [Candidate("a", 10 * (first[0] == 0), 0), Candidate("b", 10 * (first[0] == 1), 0)]
        assert order(busy, 10, b"%d" % key, spread=False) == first


def test_the_oldest_content_is_forgotten() -> None:
    held = HeldContent(capacity_tokens=100)
    first, second, third = Content(b"1", 40), Content(b"2", 40), Content(b"3", 40)
    held.add([first, second])
    held.add([first])
    held.add([third])
    assert [held.num_tokens([content]) for content in (first, second, third)] == [40, 0, 40]
    assert held.num_tokens([first, third]) == 80
    held.clear()
    assert held.num_tokens([first, second, third]) == 0


def test_the_number_of_tokens_of_a_content_may_change() -> None:
    held = HeldContent(capacity_tokens=100)
    held.add([Content(b"1", 100)])
    held.add([Content(b"1", 20)])
    held.add([Content(b"2", 80)])
    assert held.num_tokens([Content(b"1", 20), Content(b"2", 80)]) == 100


def test_content_without_tokens_takes_no_memory() -> None:
    held = HeldContent(capacity_tokens=100)
    held.add([Content(bytes([number]), 0) for number in range(200)])
    assert len(held._contents) == 0
