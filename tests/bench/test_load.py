"""Tests for the rates that the load generator computes."""

import pytest

from bench.serve.load import Answer


@pytest.mark.parametrize(
    "drawn",
    [[(2.0, 1), (2.5, 2), (4.0, 5)], [(2.0, 1), (4.0, 5)], [(2.5, 2), (4.0, 5)]],
    ids=["one token", "several", "several at first"],
)
def test_the_rate_is_measured_over_the_tokens_after_the_first_event(drawn: list[tuple[float, int]]) -> None:
    (first_s, first), *_ = drawn
    assert Answer(1.0, 9.0, drawn=drawn).tokens_per_s() == (5 - first) / (4.0 - first_s)


@pytest.mark.parametrize("drawn", [[], [(2.0, 1)]], ids=["no event", "one event"])
def test_a_rate_needs_two_events(drawn: list[tuple[float, int]]) -> None:
    with pytest.raises(RuntimeError, match=f"{len(drawn)} events .* at least 2"):
        Answer(1.0, 9.0, drawn=drawn).tokens_per_s()
