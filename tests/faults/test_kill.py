"""A slice of the matrix of kill -9 (`make faults` runs all of it): one point each of what differs in kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.warm import running_service
from tools.fault_matrix import run
from tools.fault_points import POINTS, Point
from tools.fault_rig import Rig

SLICE = (
    "tokenizer.mid-fill",  # died over the request
    "tokenizer.after-reply",  # its blocks may go before the engine has attached them
    "engine.attached",  # no output yet: sent again
    "engine.mid-decode",  # output: fails
    "api.mid-free",  # the others notice, and end
    "api.everything",  # nobody is left to clean up but the next service
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("kill"), running_service, device) as rig:
        yield rig


@pytest.mark.parametrize("point", [point for point in POINTS if str(point) in SLICE], ids=str)
def test_kill(rig: Rig, point: Point) -> None:
    found = run(rig, point)
    assert found.troubles == [], found
    if point.role == "tokenizer":
        assert found.outcomes == ["right"] * 3
    if point.name == "mid-decode":
        assert "failed" in found.outcomes


def test_every_process_has_a_dozen_points() -> None:
    assert all(sum(point.role == role for point in POINTS) >= 12 for role in ("api", "tokenizer", "engine"))
    assert {str(point) for point in POINTS} >= set(SLICE)
