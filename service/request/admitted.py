"""Responses whose requests stay admitted until the client has received nearly all of the answer."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mindie_mm.errors import InputError, MindieMMError, RequestAborted
from service.request.admission import Admission
from service.telemetry import tracing

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""Maximum time in seconds for sending the error after an answer was aborted."""

_PIECE_BYTES = 2**16
"""Maximum number of bytes to send at a time. A connection buffers this many bytes even if the client does not read."""

SendEvent = Callable[[Mapping[str, object]], None]
"""Function that sends an event."""

DONE = "[DONE]"
"""Data of the last event in OpenAI's streams. It is not JSON."""


class Admitted(Response):
    """A response that is computed and sent while its request is admitted.

    Only the last bytes, which the connection can buffer, are sent after the admission has ended. An error before the
    first byte is raised, so that the response gets the error's status. A later error aborts the response.
    """

    def __init__(self, admission: Admission, timeout_s: float | None, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._admission = admission
        self._timeout_s = timeout_s

    @abstractmethod
    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Send the answer except its last bytes, and return the last bytes."""

    def _last_words(self, _: Exception) -> bytes | None:
        """Return the bytes that report an error after the answer has begun.

        Return None if the format cannot report errors.
        """
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response as an ASGI application."""
        started = False

        async def sending(data: bytes, *, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            client = scope.setdefault("state", {}).get("client")
            async with self._admission.admit(receive, self._timeout_s, client):
                last = await self._answer(sending)
                if started:
                    await sending(b"")  # waits until the client has received nearly all bytes
        except Exception as error:
            if not started:
                raise
            scope["state"]["error"] = type(error).__name__  # for the access log, because the status was 200
            if isinstance(error, RequestAborted):
                return
            _note(error)
            if (final := self._last_words(error)) is not None:
                try:
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await sending(final, more=False)
                except TimeoutError:  # uvicorn closes the connection of an unfinished response
                    _log.info("the client does not read its response; the connection is closed")
            return
        await sending(last, more=False)


class WholeAnswer(Admitted):
    """A response with the result of `make`: an object or a list, which is encoded as JSON, or a string."""

    media_type = "application/json"

    def __init__(
        self,
        make: Callable[[], Awaitable[Mapping[str, object] | Sequence[Mapping[str, object]] | str]],
        admission: Admission,
        timeout_s: float | None = None,
        media_type: str | None = None,
    ) -> None:
        if media_type is not None:
            self.media_type = media_type
        super().__init__(admission, timeout_s)
        self._make = make

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        made = await self._make()
        body = made.encode() if isinstance(made, str) else msgspec.json.encode(made)
        del made  # while the body is sent, which takes long to a slow client
        self.headers["content-length"] = str(len(body))
        if len(body) <= _PIECE_BYTES:
            return body
        for start in range(0, len(body), _PIECE_BYTES):
            await send(body[start : start + _PIECE_BYTES])
        return b""


def _note(error: Exception) -> None:
    """Log the error that ended a started answer, and add it to the request's trace."""
    if isinstance(error, InputError):
        _log.warning("the response was aborted: %s", type(error).__name__)  # the message may quote the request
    elif isinstance(error, MindieMMError):
        _log.warning("the response was aborted: %s: %s", type(error).__name__, error)
    else:
        _log.exception("the response was aborted: %s", type(error).__name__, exc_info=error)
    if (trace := tracing.current.get()) is not None:
        trace.error = type(error).__name__


class EventStream(Admitted):
    """A stream of JSON events.

    The events are made without waiting for the client, so their resources are freed after the last event even if the
    client reads slowly. An error after the first event is sent as a further event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        make: Callable[[SendEvent], Awaitable[None]],
        failed: Callable[[Exception], Mapping[str, object]],
        admission: Admission,
        last: str | None,
        timeout_s: float | None,
        *,
        named: bool = False,
    ) -> None:
        """Create the response.

        Args:
            make: Coroutine function that sends the events.
            failed: Function that returns the event for an error.
            admission: Limits on the requests in progress.
            last: Data after the last event, or None.
            timeout_s: Maximum time in seconds for the answer, or None for the service's limit.
            named: Whether each event has a line with its `type`. Some clients use this line to choose the events that
                they read.

        """
        # Without X-Accel-Buffering, nginx would buffer several events and send them together.
        super().__init__(admission, timeout_s, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._make = make
        self._failed = failed
        self._last = last
        self._named = named
        self._waiting = asyncio.Queue[bytes | None]()
        """Events that have not been sent, and None behind the last one."""

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        waiting = self._waiting

        async def make() -> None:
            try:
                await self._make(lambda event: waiting.put_nowait(encoded(event, named=self._named)))
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
        return last_event(self._last)

    def _last_words(self, error: Exception) -> bytes:
        waiting = [self._waiting.get_nowait() or b"" for _ in range(self._waiting.qsize())]
        return b"".join(waiting) + encoded(self._failed(error), named=self._named) + last_event(self._last)


def last_event(last: str | None) -> bytes:
    """Return the event with the data `last`, or nothing if it is None."""
    return b"" if last is None else f"data: {last}\n\n".encode()


def encoded(event: Mapping[str, object], *, named: bool = False) -> bytes:
    """Return a server-sent event. If `named` is true, the event has a line with its `type`."""
    name = f"event: {event['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"
