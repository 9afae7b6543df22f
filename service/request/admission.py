"""Admits requests, and ends them early if the client disconnects, the deadline passes or the service shuts down."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from starlette.types import Receive

from mindie_mm.errors import MindieMMError, QueueFull, RequestAborted, RequestTimeout, ServiceStopping
from service.http.clients import Client


class Admission:
    """The requests in progress: at most `limit` requests at a time, each for at most `timeout_s` seconds.

    Their answers have at most `max_logprobs` log-probabilities and `max_tensor_bytes` bytes of tensors together, unless
    a single answer has more.
    """

    def __init__(
        self,
        limit: int,
        timeout_s: float,
        max_logprobs: int = sys.maxsize,
        max_tensor_bytes: int = sys.maxsize,
    ) -> None:
        self._limit = limit
        self._max_logprobs = max_logprobs
        self._max_tensor_bytes = max_tensor_bytes
        self._timeout_s = timeout_s
        self._live: set[_Endable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._grace_over = asyncio.Event()
        self.stopping = False
        """True if new requests are refused."""

    def __len__(self) -> int:
        return len(self._live)

    def require_room(self, client: Client | None = None) -> None:
        """Raise QueueFull, QuotaExceeded or ServiceStopping if no further request of `client` can be admitted."""
        if self.stopping:
            raise ServiceStopping("the service is stopping")
        if len(self._live) >= self._limit:
            raise QueueFull(f"{len(self._live)} requests are in progress; the limit is {self._limit}")
        if client is not None:
            client.require_room()

    def hold_logprobs(self, count: int) -> None:
        """Count `count` log-probabilities of the current request's answer until the request ends.

        Raises:
            QueueFull: The answers of all requests in progress would have too many log-probabilities.

        """
        advice = "(--max-held-logprobs). Send the request again later, or request fewer log probabilities"
        self._hold("log probabilities", count, self._max_logprobs, advice)

    def hold_tensors(self, num_bytes: int) -> None:
        """Count `num_bytes` bytes of tensors in the current request's answer until the request ends.

        Raises:
            QueueFull: The answers of all requests in progress would have too many bytes.

        """
        advice = "(--max-held-bytes). Send the request again later, or with mm_payload none"
        self._hold("bytes of tensors", num_bytes, self._max_tensor_bytes, advice)

    def _hold(self, noun: str, count: int, limit: int, advice: str) -> None:
        if not count:
            return
        request = _current.get()
        assert request is not None, "only an admitted request is answered"
        held = sum(other.held[noun] for other in self._live if other is not request)
        if held and held + count > limit:
            raise QueueFull(
                f"with this request, the answers of all requests in progress would have {held + count} {noun}; the "
                f"limit is {limit} {advice}"
            )
        request.held[noun] = count

    @asynccontextmanager
    async def admit(
        self, receive: Receive, timeout_s: float | None = None, client: Client | None = None
    ) -> AsyncIterator[None]:
        """Admit a request for the duration of the `with` block.

        The block is canceled if the client disconnects, the deadline passes or the service stops. The context manager
        then raises the cause after the block.

        Args:
            receive: The request's ASGI callable. It must have returned the whole body already.
            timeout_s: Maximum time in seconds for this request. The service's limit applies if it is shorter.
            client: Client whose API key the request carries.

        Raises:
            QueueFull: Too many requests are being answered.
            QuotaExceeded: The client has used its quota.
            ServiceStopping: The service is stopping, or stopped while the block ran.
            RequestAborted: The client disconnected.
            RequestTimeout: The request took too long.

        """
        self.require_room(client)
        limit_s = min(self._timeout_s, timeout_s or self._timeout_s)
        request = _Endable()
        _current.set(request)
        deadline = asyncio.get_running_loop().call_later(
            limit_s, request.end, RequestTimeout(f"the request took longer than the limit of {limit_s:g} s")
        )
        watching = asyncio.create_task(_watch(receive, request))
        self._live.add(request)
        self._idle.clear()
        if client is not None:
            client.begin()
        try:
            async with request:
                yield
        finally:
            self._live.discard(request)
            if client is not None:
                client.end()
            if not self._live:
                self._idle.set()
            deadline.cancel()
            watching.cancel()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, and wait until all requests have ended. After `grace_s` seconds, end the rest."""
        self.stopping = True
        ends = [asyncio.create_task(event.wait()) for event in (self._idle, self._grace_over)]
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        for request in self._live:
            request.end(ServiceStopping("the service stopped before the request was finished"))
        await self._idle.wait()

    def end_grace(self) -> None:
        """End the grace period of `stop`, whether `stop` has been called already or is called later."""
        self._grace_over.set()


class _Endable:
    """A context that other tasks can end with an exception. Its implementation follows `asyncio.timeout`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._cause: MindieMMError | None = None
        self.held = Counter[str]()
        """Sizes of the answer that `Admission` limits, by noun."""

    @property
    def cause(self) -> MindieMMError | None:
        """The exception that ended the block, or None."""
        return self._cause

    def end(self, cause: MindieMMError) -> None:
        """Raise `cause` from the `with` block. Only the first call has an effect, and only while the block runs."""
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
        # A cancellation by other code, such as the server, takes precedence.
        if task.uncancel() <= self._cancelling and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise self._cause from error


_current: ContextVar[_Endable | None] = ContextVar("request", default=None)


def cause_of_end() -> MindieMMError | None:
    """Return the error that ended the current task's request, or None if nothing has ended it.

    The error is RequestAborted, RequestTimeout or ServiceStopping. The task itself sees only a CancelledError.
    """
    request = _current.get()
    return None if request is None else request.cause


async def _watch(receive: Receive, request: _Endable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.end(RequestAborted("the client closed the connection"))
