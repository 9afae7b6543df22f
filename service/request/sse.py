"""A response that streams server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from service.http.errors import error_object
from service.request.admission import Admission
from service.request.admitted import Admitted

Send = Callable[[Mapping[str, object]], None]
"""Sends an event."""
DONE = "[DONE]"
"""Data of the last event in OpenAI's streams. It is not JSON."""


class EventStream(Admitted):
    """A stream of JSON events followed by `last`.

    The events are made without waiting for the client, so their resources are freed after the last event even if the
    client reads slowly. An error after the first event is sent as a further event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        make: Callable[[Send], Awaitable[None]],
        admission: Admission,
        last: str | None,
        timeout_s: float | None,
    ) -> None:
        # Without X-Accel-Buffering, nginx would buffer several events and send them together.
        super().__init__(admission, timeout_s, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._make = make
        self._last = last

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def make() -> None:
            try:
                await self._make(lambda event: waiting.put_nowait(_encode(event)))
            finally:
                waiting.put_nowait(None)

        making = asyncio.create_task(make())
        try:
            while (data := await waiting.get()) is not None:
                await send(data)
            await making
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        return _last_event(self._last)

    def _last_words(self, error: Exception) -> bytes:
        return last_words(error, self._last)


def last_words(error: Exception, last: str | None) -> bytes:
    """Return the events that end a stream after `error`."""
    return _encode(error_object(error)) + _last_event(last)


def _last_event(last: str | None) -> bytes:
    return b"" if last is None else _event(last.encode())


def _encode(event: Mapping[str, object]) -> bytes:
    return _event(msgspec.json.encode(event))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
