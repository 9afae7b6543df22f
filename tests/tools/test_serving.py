"""Tests for the service that other tests start as a fixture."""

from pathlib import Path

import pytest

from tools.serving import running_service


def test_a_service_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"did not start within 0\.1 s"),
        running_service({"spool": tmp_path}, tmp_path / "log", start_timeout_s=0.1),
    ):
        pytest.fail("started")
