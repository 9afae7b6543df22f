"""Tests for the autoscaling policy, which need no cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from service.ray.autoscaling import QueuedTokens


@pytest.mark.parametrize(
    ("reported", "waiting", "wanted"),
    [
        ({}, 0, 1),
        (None, 0, 1),
        ({"a": 0.0, "b": 0.0}, 0, 1),
        ({"a": 900.0, "b": 1100.0}, 0, 2),
        ({"a": 3000.0, "b": 0.1}, 0, 4),
        ({"a": 10.0, "b": 10.0}, 5, 3),
        ({"a": 9000.0, "b": 10.0}, 5, 10),
    ],
)
def test_replicas_follow_the_queued_tokens(reported, waiting, wanted):
    metrics = None if reported is None else {"queued_tokens": reported}
    context = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=waiting, current_num_replicas=2)
    assert QueuedTokens(1000)(context) == (wanted, {})
