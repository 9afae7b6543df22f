"""aiohttp's connector, whose connections take one answer, with few interim ones (1xx) in front of it.

aiohttp itself reads past interim answers for as long as they come. A server that sends nothing else, as fast as it can,
would have the event loop for itself.
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
"""Most interim answers (100 Continue, 103 Early Hints and the like) to one request."""


class TooManyInterim(aiohttp.ClientError):
    """A server that sends further interim answers."""


class Connector(aiohttp.TCPConnector):
    """aiohttp's, for one request a connection: with `force_close`. Its requests raise TooManyInterim."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        factory = functools.partial(_Protocol, loop=asyncio.get_running_loop())
        self._factory = factory  # type: ignore[assignment]  # mypy knows no partial of a subclass


class _Protocol(ResponseHandler):
    """One connection's."""

    _num_answers = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Takes the head of an answer, interim or not."""
        self._num_answers += 1
        if self._num_answers <= 1 + MAX_INTERIM:
            super().feed_data(data, size)
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.abort()
            self.set_exception(TooManyInterim())  # which whoever waits for the answer gets, unless it came before
