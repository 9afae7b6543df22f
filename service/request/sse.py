"""Server-sent events: a response that owns the generator of its events from first to last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import msgspec

from service.http.errors import error_object
from service.request.admission import Admission
from service.request.admitted import Admitted

DONE = "[DONE]"
"""OpenAI's last event, which is no JSON."""


class EventStream(Admitted):
    """Streams JSON events, then `last`. Their generator is closed on every way out.

    It runs as fast as its events are made, however slowly the client reads: what it holds is free once the last one is
    made. An error after the first event is one more event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[Mapping[str, object]]],
        admission: Admission,
        last: str | None,
        timeout_s: float | None,
    ) -> None:
        # nginx would gather events into lumps.
        super().__init__(admission, timeout_s, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._last = b"" if last is None else _event(last.encode())

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        async with self._event_queue() as waiting:
            while (data := await waiting.get()) is not None:
                await send(data)
        return self._last

    def _last_words(self, error: Exception) -> bytes:
        return _encode(error_object(error)) + self._last

    @asynccontextmanager
    async def _event_queue(self) -> AsyncIterator[asyncio.Queue[bytes | None]]:
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


def _encode(event: Mapping[str, object]) -> bytes:
    return _event(msgspec.json.encode(event))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
