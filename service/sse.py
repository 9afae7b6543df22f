"""Server-sent events: a response that owns the generator of its events from first to last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mindie_mm.errors import MindieMMError, RequestAborted
from service import tracing
from service.admission import Admission
from service.errors import error_object

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, streamed on request.", "content": {"text/event-stream": {}}}
}
"""A streaming route's answer, for the interface's description."""

_LAST_WORDS_S = 1.0
"""How long a client whose answer broke off may take to hear of it."""


class EventStream(Response):
    """Streams JSON events, then `last`. The generator runs inside `admission` and is closed on every way out.

    It runs as fast as its events are made, however slowly the client reads: what it holds is free once the last one is
    made. An error before the first event is raised, so that it gets its own status; after it, the error is an event.
    """

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[dict[str, Any]]],
        admission: Admission,
        last: bytes,
        timeout_s: float | None,
    ) -> None:
        # nginx would gather events into lumps.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._admission = admission
        self._last = last
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        started = False
        try:
            async with (
                self._admission.admit(receive, self._timeout_s),
                self._made() as waiting,
            ):
                while (data := await waiting.get()) is not None:
                    if not started:
                        started = True
                        await send(
                            {
                                "type": "http.response.start",
                                "status": self.status_code,
                                "headers": self.raw_headers,
                            }
                        )
                    await _send(send, data)
        except Exception as error:
            if not started:
                raise
            scope.setdefault("state", {})["error"] = type(error).__name__  # the status said that all is well
            if isinstance(error, RequestAborted):
                return
            await self._break_off(error, send)
            return
        await _send(send, self._last, more=False)

    async def _break_off(self, error: Exception, send: Send) -> None:
        """Tells the client of a started answer, in its last event, and the operator what ended it."""
        if isinstance(error, MindieMMError):
            _log.warning("the answer broke off: %s: %s", type(error).__name__, error)
        else:
            _log.exception("the answer broke off: %s", type(error).__name__, exc_info=error)
        if (trace := tracing.current.get()) is not None:
            trace.error = type(error).__name__
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await _send(send, _encode(error_object(error)) + self._last, more=False)
        except TimeoutError:  # left unfinished, the connection is closed
            _log.info("the client reads nothing, and is not told")

    @asynccontextmanager
    async def _made(self) -> AsyncIterator[asyncio.Queue[bytes | None]]:
        """The events, encoded, as they are made; None is behind the last. What their generator raises is raised."""
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def make() -> None:
            try:
                async with aclosing(self._events()) as events:
                    async for event in events:
                        waiting.put_nowait(_encode(event))
            finally:
                waiting.put_nowait(None)

        making = asyncio.create_task(make())
        try:
            yield waiting
            await making
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
