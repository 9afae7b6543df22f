"""Work that may get stuck in the system, in threads of its own: names looked up, files of a mount that stalls.

The event loop's threads are few and do other work, and neither a lookup nor a read can be ended: those that nothing
answers would hold up all else, long after the requests that they were for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MAX_THREADS = 64
"""Most works at a time, those included that nobody waits for any more."""
MAX_OF_A_REQUEST = 4
"""Most of them that are for one request; further ones wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    do: Callable[[], Any]
    request: str | None
    """The request that it is for."""
    done: Future[Any] = field(default_factory=Future)


class Threads:
    """Works, each in a daemon thread, so that a process ends without them. For any thread and any event loop."""

    def __init__(self, name: str) -> None:
        """`name` is that of each thread."""
        self._name = name
        self._lock = threading.Lock()
        self._waiting: list[_Work] = []
        self._running: list[_Work] = []

    async def run(self, do: Callable[[], T], request: str | None = None) -> T:
        """`do()`. When cancelled, what has begun goes on, and nobody has its result; the rest is not done.

        `request` names whose work it is: of one request only so many run at a time. None: nobody's. OSError where no
        further thread is to be had.
        """
        work = _Work(do, request)
        with self._lock:
            self._waiting.append(work)
            self._start()
        try:
            return await asyncio.wrap_future(work.done)
        finally:
            with self._lock:
                if work in self._waiting:
                    self._waiting.remove(work)

    def _start(self) -> None:
        """Starts what may run of what waits, the longest waiting first; the lock is held."""
        for work in [*self._waiting]:
            if len(self._running) >= MAX_THREADS:
                return
            own = sum(running.request == work.request for running in self._running)
            if work.request is not None and own >= MAX_OF_A_REQUEST:
                continue
            self._waiting.remove(work)
            if not work.done.set_running_or_notify_cancel():
                continue
            try:
                threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True).start()
            except RuntimeError as error:  # no further thread is to be had
                work.done.set_exception(OSError(str(error)))
            else:
                self._running.append(work)

    def _run(self, work: _Work) -> None:
        try:
            work.done.set_result(work.do())
        except Exception as error:  # noqa: BLE001 - whoever waits has it
            work.done.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(work)
                self._start()
