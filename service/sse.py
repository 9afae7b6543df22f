"""Server-sent events: a response that owns the generator of its events from first to last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from service.admission import Admission
from service.admitted import Admitted
from service.errors import error_object

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, streamed on request.", "content": {"text/event-stream": {}}}
}
"""A streaming route's answer, for the interface's description."""


class EventStream(Admitted):
    """Streams JSON events, then `last`. Their generator is closed on every way out.

    It runs as fast as its events are made, however slowly the client reads: what it holds is free once the last one is
    made. An error after the first event is one more event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[dict[str, Any]]],
        admission: Admission,
        last: bytes,
        timeout_s: float | None,
    ) -> None:
        # nginx would gather events into lumps.
        super().__init__(admission, timeout_s, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._last = last

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        async with self._made() as waiting:
            while (data := await waiting.get()) is not None:
                await send(data)
        return self._last

    def _last_words(self, error: Exception) -> bytes:
        return _encode(error_object(error)) + self._last

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
