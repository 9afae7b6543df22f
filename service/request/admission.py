"""Which requests are being answered, and what may end one early: its client, its deadline, the service's stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from starlette.types import Receive

from mindie_mm.errors import MindieMMError, QueueFull, RequestAborted, RequestTimeout, ServiceStopping


class Admission:
    """The requests being answered, at most `limit` of them, each for at most `timeout_s` seconds."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._live: set[_Endable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._grace_over = asyncio.Event()
        self.stopping = False
        """No request is admitted any more."""

    def __len__(self) -> int:
        return len(self._live)

    def require_room(self) -> None:
        """QueueFull or ServiceStopping unless one more would be admitted now."""
        if self.stopping:
            raise ServiceStopping("the service is stopping")
        if len(self._live) >= self._limit:
            raise QueueFull(f"{len(self._live)} requests are being answered, the limit is {self._limit}")

    @asynccontextmanager
    async def admit(self, receive: Receive, timeout_s: float | None = None) -> AsyncIterator[None]:
        """A request's life. Its body, which `receive` must have given whole already, runs inside.

        The task is cancelled when the client leaves (RequestAborted), the deadline passes (RequestTimeout) or the
        service stops (ServiceStopping), and the cause is raised from here, once everything inside has been left.
        Raises QueueFull and ServiceStopping at once.
        """
        self.require_room()
        limit_s = min(self._timeout_s, timeout_s or self._timeout_s)
        request = _Endable()
        _current.set(request)
        deadline = asyncio.get_running_loop().call_later(
            limit_s, request.end, RequestTimeout(f"the request took longer than the limit of {limit_s:g} s")
        )
        client = asyncio.create_task(_watch(receive, request))
        self._live.add(request)
        self._idle.clear()
        try:
            async with request:
                yield
        finally:
            self._live.discard(request)
            if not self._live:
                self._idle.set()
            deadline.cancel()
            client.cancel()

    async def stop(self, grace_s: float) -> None:
        """Admits nothing more; returns when no request is left, those that outlive `grace_s` seconds ended."""
        self.stopping = True
        ends = [asyncio.create_task(event.wait()) for event in (self._idle, self._grace_over)]
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        for request in self._live:
            request.end(ServiceStopping("the service stopped before the request was finished"))
        await self._idle.wait()

    def end_grace(self) -> None:
        """Has `stop`, which is waiting or is called later, end what runs at once."""
        self._grace_over.set()


class _Endable:
    """A block of the current task that others can end with an exception; as asyncio.timeout, for any cause."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._cause: MindieMMError | None = None

    @property
    def cause(self) -> MindieMMError | None:
        """What it was ended with, if it was."""
        return self._cause

    def end(self, cause: MindieMMError) -> None:
        """Raises `cause` from the block; the first call counts, and none after the block has been left."""
        if self._task is not None and self._cause is None:
            self._cause = cause
            self._task.cancel()

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._cause is None:
            return
        # Someone else's cancellation, of the server perhaps, goes first.
        if task.uncancel() <= self._cancelling and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise self._cause from error


_current: ContextVar[_Endable | None] = ContextVar("request", default=None)


def cause_of_end() -> MindieMMError | None:
    """What ends the admitted request that the current task works for, which sees a cancellation alone.

    RequestAborted, RequestTimeout or ServiceStopping; None while nothing ends it.
    """
    request = _current.get()
    return None if request is None else request.cause


async def _watch(receive: Receive, request: _Endable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.end(RequestAborted("the client closed the connection"))
