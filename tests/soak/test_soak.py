"""A slice of `make soak`."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import findings
from tests.soak.run import soak


@pytest.mark.slow
def test_a_slice_of_the_soak_finds_nothing() -> None:
    """Memory is left out: over so few requests caches still fill."""
    figures = soak(300, warm=100, every=100, clients=12, pictures=4).figures()
    found = {name: figures[name] for name, bad in findings(figures).items() if bad and name != "memory_growth"}
    assert not found, (found, figures["wrong"])
