"""Answers that count as being answered until their client has taken them."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mindie_mm.errors import MindieMMError, RequestAborted
from service.request.admission import Admission
from service.telemetry import tracing

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""How long a client whose answer broke off may take to hear of it."""

_PIECE_BYTES = 2**16
"""Most of a whole answer that is sent at a time; the connection takes as much without a reader."""


class Admitted(Response):
    """Made and sent inside `admission`; left to be sent behind it is less than a connection holds without a reader.

    An error before the first byte is raised, so that it gets its own status. After it the answer breaks off.
    """

    def __init__(self, admission: Admission, timeout_s: float | None, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._admission = admission
        self._timeout_s = timeout_s

    @abstractmethod
    async def _answer(self, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Sends the answer, but for its last bytes, which are returned."""

    def _last_words(self, _: Exception) -> bytes | None:
        """What still tells the client of a started answer what ended it; None where nothing can."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
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
                    await sending(b"")  # waits until the client has taken nearly all
        except Exception as error:
            if not started:
                raise
            scope.setdefault("state", {})["error"] = type(error).__name__  # the status said that all is well
            if isinstance(error, RequestAborted):
                return
            _note(error)
            if (final := self._last_words(error)) is not None:
                try:
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await sending(final, more=False)
                except TimeoutError:  # left unfinished, the connection is closed
                    _log.info("the client reads nothing; its answer is dropped")
            return
        await sending(last, more=False)


class WholeAnswer(Admitted):
    """What `make` makes, as JSON."""

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
    """Tells the operator what ended an answer that had begun."""
    if isinstance(error, MindieMMError):
        _log.warning("the answer broke off: %s: %s", type(error).__name__, error)
    else:
        _log.exception("the answer broke off: %s", type(error).__name__, exc_info=error)
    if (trace := tracing.current.get()) is not None:
        trace.error = type(error).__name__
