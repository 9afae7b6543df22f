"""Fake step timeouts, to test the engine."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from mindie_mm.shm.mapped import close_removed
from tests.removed_arenas import removed_arenas

STEP_TIMEOUT_S = 86.0
"""Value of EngineConfig.step_timeout_s that tests use to select a fake timeout."""


@pytest.fixture
def unmapped() -> Iterator[None]:
    """Check that no removed arena stays mapped after a test, without a run of the garbage collector."""
    before = removed_arenas([os.getpid()], 0)
    gc.disable()
    yield
    close_removed(cleanups=True)
    left = removed_arenas([os.getpid()], 0)
    gc.enable()
    assert left <= before


class Periods:
    """Fake step timeouts of `STEP_TIMEOUT_S`. They pass only when the test ends them."""

    def __init__(self) -> None:
        self._begun = self._over = 0
        self._changed = asyncio.Condition()

    async def passed(self, number: int) -> None:
        """Let `number` timeouts pass, one after another.

        Before each timeout, wait until the engine has started to wait for a step.
        """
        async with self._changed:
            for _ in range(number):
                await self._changed.wait_for(lambda: self._begun > self._over)
                self._over += 1
                self._changed.notify_all()

    async def wait(self) -> None:
        """Start a fake step timeout, and wait until the test ends it."""
        async with self._changed:
            self._begun += 1
            period = self._begun
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._over >= period)


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> Periods:
    """Replace the engine's step timeout by fake timeouts. Other timeouts stay real."""
    replacement, wait = Periods(), asyncio.wait

    async def waiting(tasks: Iterable[asyncio.Task[Any]], **options: Any) -> Any:
        if options.get("timeout") != STEP_TIMEOUT_S:
            return await wait(tasks, **options)
        period = asyncio.create_task(replacement.wait())
        done, pending = await wait({*tasks, period}, return_when=asyncio.FIRST_COMPLETED)
        period.cancel()
        return done - {period}, pending - {period}

    monkeypatch.setattr(asyncio, "wait", waiting)
    return replacement
