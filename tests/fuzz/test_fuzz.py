"""A short version of `make fuzz`, with a fixed seed."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import TARGETS, run

INPUTS = {"living_arena": 1500, "arena_file": 400, "images": 1000, "videos": 1500, "clips": 1500, "embeddings": 1500}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_fuzzing_run_has_no_findings(name: str) -> None:
    result = run(name, INPUTS.get(name, 5000), seed=7)
    assert result.accepted > result.inputs // 50, "too few inputs pass the checks in front of the code"
