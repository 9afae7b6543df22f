"""A connection whose requests' heads must come in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
"""Longest that a new connection, or one that has begun a request, may take for the request's head."""


class Connection(HttpToolsProtocol):
    """uvicorn's, closed when a request's head does not come; the wait between two requests is uvicorn's own."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Any byte ends uvicorn's pause, also of a body whose request was answered before it came: it begins anew.
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._waiting is None and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._unset_keepalive_if_required()  # where the client reset it, uvicorn leaves this, which holds what it has
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_is_here()
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
