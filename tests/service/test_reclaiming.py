"""Tests for the service's periodic reclaiming of shared memory."""

import asyncio
from pathlib import Path

import pytest

from service.app import reclaiming


class Unforeseen(type(Path())):  # type: ignore[misc]
    """A spool path whose use raises ZeroDivisionError, which no file operation raises."""

    def __fspath__(self) -> str:
        raise ZeroDivisionError


async def test_an_unforeseen_error_does_not_end_periodic_reclaiming(caplog: pytest.LogCaptureFixture) -> None:
    async with reclaiming([Unforeseen("spool")], 0.01), asyncio.timeout(120):
        while caplog.text.count("shared memory cannot be reclaimed") < 3:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
    assert "ZeroDivisionError" in caplog.text
