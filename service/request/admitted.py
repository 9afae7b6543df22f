"""Responses whose requests stay admitted until the client has received nearly all of the answer."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping

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
        """Return the bytes that report an error after the answer has begun. None if the format cannot report errors."""
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
            async with self._admission.admit(receive, self._timeout_s):
                last = await self._answer(sending)
                if started:
                    await sending(b"")  # waits until the client has received nearly all bytes
        except Exception as error:
            if not started:
                raise
            scope.setdefault("state", {})["error"] = type(
                error
            ).__name__  # for the access log, because the status was 200
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
    """A JSON response with the result of `make`."""

    media_type = "application/json"

    def __init__(
        self, make: Callable[[], Awaitable[Mapping[str, object]]], admission: Admission, timeout_s: float | None = None
    ) -> None:
        super().__init__(admission, timeout_s)
        self._make = make

    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        body = msgspec.json.encode(await self._make())
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
