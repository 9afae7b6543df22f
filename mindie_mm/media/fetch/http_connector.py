"""An aiohttp connector that limits the number of interim responses (1xx) before the final response.

aiohttp skips any number of interim responses. If a server kept sending interim responses, it would occupy the event
loop.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

MAX_INTERIM = 8
"""Maximum number of interim responses to one request, such as 100 Continue and 103 Early Hints."""


class TooManyInterim(aiohttp.ClientError):
    """An error for a server that sends more than `MAX_INTERIM` interim responses."""


class Connector(aiohttp.TCPConnector):
    """A TCP connector. Its requests raise TooManyInterim if the server sends too many interim responses.

    Responses are counted per connection. Set `force_close`, so that each connection is used for only one request.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        factory = functools.partial(_Protocol, loop=asyncio.get_running_loop())
        self._factory = factory  # type: ignore[assignment]  # mypy rejects a partial of a subclass


class _Protocol(ResponseHandler):
    """Protocol handler that aborts its connection after too many interim responses."""

    _num_answers = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Handle the head of an interim or final response. Abort the connection after too many interim responses."""
        self._num_answers += 1
        if self._num_answers <= 1 + MAX_INTERIM:
            super().feed_data(data, size)
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.abort()
            self.set_exception(TooManyInterim())  # raised by the code that waits for the response, if it still waits
