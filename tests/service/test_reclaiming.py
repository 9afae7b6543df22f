"""The service's own collecting, which goes on whatever happens."""

import asyncio
from pathlib import Path

import pytest

from service.app import reclaiming


class Unforeseen(type(Path())):  # type: ignore[misc]
    """A spool that fails with none of the errors that a spool can fail with."""

    def __fspath__(self) -> str:
        raise ZeroDivisionError


async def test_what_nobody_foresaw_ends_one_turn_and_not_those_after_it(caplog: pytest.LogCaptureFixture) -> None:
    async with reclaiming(Unforeseen("spool"), 0.01), asyncio.timeout(120):
        while caplog.text.count("shared memory cannot be reclaimed") < 3:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
    assert "ZeroDivisionError" in caplog.text
