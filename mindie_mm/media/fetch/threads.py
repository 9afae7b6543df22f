"""Threads for system calls that may hang, such as name lookups and reads from a stalled mount.

A lookup or a read cannot be canceled. The event loop's own pool has few threads. Calls that hang in these threads would
block all other work in the pool, even long after the requests have ended.
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
"""Maximum number of running calls. Calls whose callers no longer wait also count."""
MAX_OF_A_REQUEST = 4
"""Maximum number of running calls for one request. Further calls wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    do: Callable[[], Any]
    request: str | None
    """Id of the request that needs the result, or None."""
    done: Future[Any] = field(default_factory=Future)


class Threads:
    """A limited number of daemon threads, which do not keep the process alive. Each call has its own thread.

    The methods may be called from any thread and any event loop.
    """

    def __init__(self, name: str) -> None:
        """Create an object without threads. `name` is the name for all its threads."""
        self._name = name
        self._lock = threading.Lock()
        self._waiting: list[_Work] = []
        self._running: list[_Work] = []

    async def run(self, do: Callable[[], T], request: str | None = None) -> T:
        """Call `do` in a thread and return its result.

        If this coroutine is canceled while the call runs, the call continues and its result is dropped. If the call is
        still waiting, it never runs.

        Args:
            do: The function to call.
            request: Id of the request that needs the result. At most `MAX_OF_A_REQUEST` calls for a request run at the
                same time. None means that there is no request, and that this limit does not apply.

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
        """Start the waiting calls that may run, in order of arrival. The caller holds the lock."""
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
        except Exception as error:  # noqa: BLE001 - the future passes the exception to the caller of `run`
            work.done.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(work)
                self._start()
