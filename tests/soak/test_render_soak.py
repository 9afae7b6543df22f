"""A short version of `make soak-render`."""

from __future__ import annotations

import pytest

from tests.soak.render import soak


@pytest.mark.slow
def test_a_short_soak_of_render_has_no_findings() -> None:
    assert not soak(60, workers=2).findings
