"""A response that streams server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import msgspec

from service.http.errors import error_object
from service.request.admission import Admission
from service.request.admitted import Admitted

DONE = "[DONE]"
"""Data of the last event in OpenAI's streams. It is not JSON."""


class EventStream(Admitted):
    """A stream of JSON events followed by `last`. The generator of the events is always closed.

    The generator does not wait for the client, so its resources are freed after the last event even if the client
    reads slowly. An error after the first event is sent as a further event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[Mapping[str, object]]],
        admission: Admission,
        last: str | None,
        timeout_s: float | None,
    ) -> None:
        # Without X-Accel-Buffering, nginx would buffer several events and send them together.
        super().__init__(admission, timeout_s, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._last = last

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        async with self._event_queue() as waiting:
            while (data := await waiting.get()) is not None:
                await send(data)
        return _last_event(self._last)

    def _last_words(self, error: Exception) -> bytes:
        return last_words(error, self._last)

    @asynccontextmanager
    async def _event_queue(self) -> AsyncIterator[asyncio.Queue[bytes | None]]:
        """Yield a queue of encoded events that ends with None. Raise the generator's errors at exit."""
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


def last_words(error: Exception, last: str | None) -> bytes:
    """Return the events that end a stream after `error`."""
    return _encode(error_object(error)) + _last_event(last)


def _last_event(last: str | None) -> bytes:
    return b"" if last is None else _event(last.encode())


def _encode(event: Mapping[str, object]) -> bytes:
    return _event(msgspec.json.encode(event))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
