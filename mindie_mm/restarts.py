"""Processes that are to run for as long as the service does: started again when they die, and how often that was."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from mindie_mm.errors import InputError

T = TypeVar("T")

_log = logging.getLogger(__name__)

RESTART_WAIT_S = 120.0
"""How long a request waits for a process that is started again."""


@contextmanager
def logged(what: str) -> Iterator[None]:
    """One failure, whatever it is, does not end what goes on for as long as the service does."""
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever it is
        _log.exception(what)


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often processes were started in place of dead ones."""

    started: int
    failed: int
    """Tries at it that failed."""

    @classmethod
    def of(cls, starters: Iterable[Starter]) -> Restarts:
        """The sums over all `starters`."""
        counts = [(starter.restarts, starter.failures) for starter in starters]
        return cls(sum(started for started, _ in counts), sum(failed for _, failed in counts))


class Starter:
    """Starts a process again and again, after pauses that grow as long as none of them proves of any use."""

    def __init__(self, what: str, first_pause_s: float = 0.5, last_pause_s: float = 30.0) -> None:
        self._what = what
        self._first_pause_s = first_pause_s
        self._last_pause_s = last_pause_s
        self.pause_s = 0.0
        """How long the next try waits."""
        self.restarts = 0
        """Processes that were started in place of one that died."""
        self.failures = 0
        """Tries at it that failed."""
        self._failing_since_s = math.inf
        """When its first try failed since it last ran, on the clock of time.monotonic."""
        self._is_hopeless = False
        """Whether the last try failed by a mistake, such as a checkpoint that is gone, which no other try mends."""

    def patience_s(self, wait_s: float = RESTART_WAIT_S) -> float:
        """Return how long a request is to wait for the process: at most `wait_s`, and not at all without hope.

        `wait_s` counts from the first failed try on, so that many requests wait no longer, one after another, than one.
        """
        if self._is_hopeless:
            return 0.0
        return max(0.0, min(wait_s, self._failing_since_s + wait_s - time.monotonic()))

    def proved(self) -> None:
        """The process has answered: whatever ends it, the next one is started at once."""
        self.pause_s = 0.0

    async def again(self, start: Callable[[], Awaitable[T]]) -> T:
        """What `start` gives, called for as long as it fails: at once, then after pauses that double up to the last.

        A process that dies before it has `proved` counts as a failure for the pause.
        """
        while True:
            if self.pause_s:
                _log.warning("%s is started again in %.1f s", self._what, self.pause_s)
                await asyncio.sleep(self.pause_s)
            self.pause_s = min(max(2 * self.pause_s, self._first_pause_s), self._last_pause_s)
            try:
                started = await start()
            except Exception as error:  # noqa: BLE001 - whatever keeps it from starting may pass
                self.failures += 1
                self._failing_since_s = min(self._failing_since_s, time.monotonic())
                self._is_hopeless = isinstance(error, InputError)
                _log.exception("%s did not start, try %d", self._what, self.failures)
            else:
                self.restarts += 1
                self._failing_since_s, self._is_hopeless = math.inf, False
                _log.warning("%s was started again (restart %d)", self._what, self.restarts)
                return started
