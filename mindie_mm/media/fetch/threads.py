"""Threads for system calls that may hang, such as name lookups and reads from a stalled mount.

Neither a lookup nor a read can be cancelled. In the few threads of the event loop, calls that hang would block all
other work long after their requests ended.
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
"""Maximum number of running calls, including calls whose result is no longer awaited."""
MAX_OF_A_REQUEST = 4
"""Maximum number of running calls for one request. Further calls wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    do: Callable[[], Any]
    request: str | None
    """Request on whose behalf the call runs, or None."""
    done: Future[Any] = field(default_factory=Future)


class Threads:
    """A limited set of daemon threads, one per call, that do not keep the process alive.

    The methods may be called from any thread and any event loop.
    """

    def __init__(self, name: str) -> None:
        """Set the name of the threads."""
        self._name = name
        self._lock = threading.Lock()
        self._waiting: list[_Work] = []
        self._running: list[_Work] = []

    async def run(self, do: Callable[[], T], request: str | None = None) -> T:
        """Call `do` in a thread and return its result.

        If this coroutine is cancelled, a call that is running continues and its result is dropped. A call that is
        waiting is not made.

        Args:
            do: The function to call.
            request: Request on whose behalf the call is made. At most `MAX_OF_A_REQUEST` of its calls run at a time.
                None if there is no request, so that this limit does not apply.

        Raises:
            OSError: The system cannot start another thread.

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
        """Start the waiting calls that may run, in the order of their arrival. The caller holds the lock."""
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
            except RuntimeError as error:  # the system cannot start another thread
                work.done.set_exception(OSError(str(error)))
            else:
                self._running.append(work)

    def _run(self, work: _Work) -> None:
        try:
            work.done.set_result(work.do())
        except Exception as error:  # noqa: BLE001 - passed on to the caller of `run`
            work.done.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(work)
                self._start()
