"""Restarts of processes that run as long as the service, with counters and increasing pauses."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from mindie_mm.errors import InputError, MindieMMError

T = TypeVar("T")

_log = logging.getLogger(__name__)

RESTART_WAIT_S = 120.0
"""Maximum time in seconds that a request waits for a process to restart."""


@contextmanager
def logged(what: str) -> Iterator[None]:
    """Log any exception that the block raises, and continue. Use this in loops that run as long as the service."""
    try:
        yield
    except MindieMMError as error:  # its message says why, so that nobody has to read a traceback
        _log.error("%s: %s", what, error)
    except Exception:  # noqa: BLE001 - no exception may end the loop
        _log.exception(what)


@dataclass(frozen=True, slots=True)
class Restarts:
    """Counters for the restarts of dead processes."""

    started: int
    """Number of successful restarts."""
    failed: int
    """Number of failed attempts to restart."""

    @classmethod
    def of(cls, starters: Iterable[Starter]) -> Restarts:
        """Return the sums of the counters of all `starters`."""
        counts = [(starter.restarts, starter.failures) for starter in starters]
        return cls(sum(started for started, _ in counts), sum(failed for _, failed in counts))


class Starter:
    """A starter that restarts a process and repeats failed attempts.

    The pauses between attempts grow until the process has answered a request.
    """

    def __init__(self, what: str, first_pause_s: float = 0.5, last_pause_s: float = 30.0) -> None:
        self._what = what
        self._first_pause_s = first_pause_s
        self._last_pause_s = last_pause_s
        self.pause_s = 0.0
        """Pause in seconds before the next attempt."""
        self.restarts = 0
        """Number of successful restarts."""
        self.failures = 0
        """Number of failed attempts to restart."""
        self.failing = asyncio.Event()
        """Set if the last attempt to restart failed."""
        self._failing_since_s = math.inf
        """Time of the first failed attempt since the process last ran, as returned by time.monotonic."""
        self._is_hopeless = False
        """True if the last attempt failed with an InputError, such as a missing checkpoint. Restarting cannot help."""

    def patience_s(self, wait_s: float = RESTART_WAIT_S) -> float:
        """Return how many seconds a request should wait for the process. Return 0 if a restart cannot succeed.

        All requests stop waiting `wait_s` seconds after the first failed attempt. A later request therefore waits for a
        shorter time.
        """
        if self._is_hopeless:
            return 0.0
        return max(0.0, min(wait_s, self._failing_since_s + wait_s - time.monotonic()))

    def proved(self) -> None:
        """Record that the process has answered a request, so that the next restart needs no pause."""
        self.pause_s = 0.0

    async def again(self, start: Callable[[], Awaitable[T]]) -> T:
        """Call `start` until it succeeds, and return its result.

        Each failed attempt doubles the pause before the next attempt. If a process starts, but dies before `proved` is
        called, the pause is doubled, too.
        """
        while True:
            if self.pause_s:
                _log.warning("%s will be restarted in %.1f s", self._what, self.pause_s)
                await asyncio.sleep(self.pause_s)
            self.pause_s = min(max(2 * self.pause_s, self._first_pause_s), self._last_pause_s)
            try:
                started = await start()
            except Exception as error:  # noqa: BLE001 - the cause of any exception may be temporary
                self.failures += 1
                self.failing.set()
                self._failing_since_s = min(self._failing_since_s, time.monotonic())
                self._is_hopeless = isinstance(error, InputError)
                _log.exception("%s did not start (attempt %d)", self._what, self.failures)
            else:
                self.restarts += 1
                self.failing.clear()
                self._failing_since_s, self._is_hopeless = math.inf, False
                _log.warning("%s was restarted (restart %d)", self._what, self.restarts)
                return started
