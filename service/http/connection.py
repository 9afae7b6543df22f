"""A connection whose requests' heads must come in time, and be short; no request changes the protocol."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mindie_mm.errors import LimitExceeded
from service.http.errors import error_body
from service.http.json_response import JSONResponse

HEAD_TIMEOUT_S = 10.0
"""Longest that a new connection, or one that has begun a request, may take for the request's head."""
MAX_HEAD_BYTES = 64 * 2**10
"""Longest head of a request, its URL included; so too what follows a chunked body (trailers)."""
MAX_HEADERS = 256
"""Most header lines of a head; so too trailers."""
MAX_PIPELINED = 64
"""Most requests that wait for the answer to an earlier one of their connection; further ones get none."""
MAX_SMALL_CHUNKS = 4096
"""Most chunks of a body beyond one for each SMALL_CHUNK_BYTES of it: each costs as much as some thousand bytes."""
SMALL_CHUNK_BYTES = 16
MAX_AHEAD_BYTES = 2**16
"""Most that is kept of what comes behind those; the connection of a longer one ends with the answer that is due."""
LINGER_S = 2.0
"""How long a connection goes on reading behind a refusal, or the rest of a body that was answered before it came.

So the client reads the answer before a reset; and where the body ends in time, the connection can be used again.
"""
MAX_DROPPED_BYTES = 2**26
"""Most that it reads then: many clients read no answer before they have sent a whole request."""
CHUNK_BYTES = 1024
"""What each chunk counts for beside its bytes."""

MOST_RESERVED_DESCRIPTORS = 64
"""Number of file descriptors that connections leave free for files and processes, or an eighth of all if fewer."""
TELL_AGAIN_S = 60.0
"""Least time in seconds between two log records about missing descriptors."""

_log = logging.getLogger(__name__)

_TOO_MANY_BYTES = (431, f"the request's head is longer than the limit of {MAX_HEAD_BYTES} bytes")


@dataclass(slots=True)
class _Lines:
    """The lines of a head, or of trailers, while they come: both counts of bytes are at most their length so far."""

    num_headers: int = 0
    num_parsed_bytes: int = 0
    """Of the URL, and of headers that are whole."""
    num_read_bytes: int = 0
    """Of the reads that brought nothing else, where a header that is not whole yet is counted, too."""


class Connection(HttpToolsProtocol):
    """A uvicorn connection with limits on the heads of requests, in time and in size.

    - The connection is closed if a head does not arrive in time. uvicorn limits the pause between two requests.
    - A head that is too long gets status 431, and bytes that are not HTTP get 400. Then the connection ends. If earlier
      requests wait for answers, it ends after the last of these answers instead.
    - An offer to upgrade is ignored (RFC 9110, 7.8).
    - A response of unknown length to an HTTP/1.0 client is not chunked, and ends with the connection.
    - If a request is answered before its body is complete, only a little more of the body is read. Then the connection
      ends.
    - Near the limit of open files, a new connection gets 503, and the log says which limit to raise.
    - Bytes that arrive while a request waits for an earlier answer are read but not parsed. Only reading reveals that
      the client has disconnected.
    """

    _waiting: asyncio.TimerHandle | None = None
    _lines: _Lines | None = None
    """None within a body and between requests."""
    _in_body: bool = False
    """Whether the head of a request is complete and its body is not."""
    _num_body_bytes: int = 0
    _num_chunks: int = 0
    _too_long: tuple[int, str] | None = None
    """Status and message for refusing a head, or a body of small chunks."""
    _refused: bool = False
    """Whether parsing has stopped."""
    _num_dropped_bytes: int = 0
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last. uvicorn's `cycle` is the request whose head came last."""
    _ahead: bytes = b""
    """Bytes that arrived while requests waited for an earlier answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        # A new descriptor gets the lowest free number, so all lower ones are in use. libuv resets new connections when
        # no descriptor is left.
        descriptor = transport.get_extra_info("socket").fileno()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptor >= limit - min(MOST_RESERVED_DESCRIPTORS, limit // 8):
            _warn_of_descriptors(descriptor, limit)
            self._refuse(503, f"the service has too many connections: its limit of open files is {limit}")

    def data_received(self, data: bytes) -> None:
        if self._refused or self._in_answered_body:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()
                return
        if self._refused:
            return
        if self.pipeline:
            self._keep(data)
            return
        lines = self._lines
        self._parse(data)
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn paused it
        if lines is not None and lines is self._lines and not self._refused:
            lines.num_read_bytes += len(data)
            if lines.num_read_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_MANY_BYTES)
        # Any byte ends uvicorn's pause, also the last of a body that was answered before it came: it begins anew.
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._waiting is None and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise LimitExceeded(f"more than {MAX_PIPELINED} requests wait for the answer to an earlier one")
        super().on_message_begin()
        self._lines = _Lines()
        if self.cycle is None or self.cycle.response_complete:  # else it may be we who do not read on
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), num_headers=1)
        if not self._in_body:  # trailers are no headers of the request (RFC 9110, 6.5.1), and nobody asks for them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("a tunnel is for proxies")
            return  # `_parse` has it come again, without the wish
        self._head_is_here()
        self._lines = None
        self._in_body = True
        self._num_body_bytes = self._num_chunks = 0
        super().on_headers_complete()
        if self.scope["http_version"] != "1.1":
            _send_no_chunks(self.cycle)

    def on_chunk_header(self) -> None:
        """Before a chunk's bytes, or before the trailers, which nothing else announces."""
        self._lines = _Lines()
        self._num_chunks += 1
        self._num_dropped_bytes += CHUNK_BYTES
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_body_bytes // SMALL_CHUNK_BYTES:
            self._raise(
                413,
                f"the request's body comes in chunks of less than {SMALL_CHUNK_BYTES} bytes, and in more of them than "
                f"the limit of {MAX_SMALL_CHUNKS}",
            )

    def on_body(self, body: bytes) -> None:
        self._lines = None
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._in_answered_body:
            self._head_is_here()  # the next one may be waited for, as behind any answer
        self._lines = None
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_answered_body:
            self._unset_keepalive_if_required()
            self._linger()
        elif self.cycle.response_complete and self._lines is not None:
            self._await_head()
        elif not self.pipeline and self._ahead:
            data, self._ahead = self._ahead, b""
            self.data_received(data)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where the parser fails, be it that one of the above raised."""
        if self._too_long is not None:
            self._refuse(*self._too_long)
        else:
            self._refuse(400, "the request is not valid HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._unset_keepalive_if_required()  # where the client reset it, uvicorn leaves this, which holds what it has
        if self._running is not None and not self._running.response_complete:  # uvicorn tells the last one alone
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def drain(self) -> None:
        """Ends the connection at once where it rests between requests, else with the answer that is due.

        One that was just made, or has begun a request, goes on: its answer has to end it.
        """
        if self.cycle is None or (self.cycle.response_complete and self._lines is not None):
            return
        self.shutdown()

    @property
    def _in_answered_body(self) -> bool:
        """Whether the rest of a body comes that nobody reads any more."""
        return self._in_body and self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _keep(self, data: bytes) -> None:
        """Until the requests that wait are being answered."""
        if len(self._ahead) + len(data) <= MAX_AHEAD_BYTES:
            self._ahead += data
            return
        assert self._running is not None, "a request waits for none"
        self._refused = True
        self._num_dropped_bytes = 0
        self._ahead = b""
        self.pipeline.clear()
        self._running.keep_alive = False

    def _parse(self, data: bytes) -> None:
        """As uvicorn's, but that a request which asks for an upgrade is parsed again without it.

        httptools takes the end of its head for its own, and its body for another protocol's (httptools' issue 124).
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)  # the old one may still count the body that it did not read
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("")
                return

    def _without_upgrade(self) -> bytes:
        """The head that was just parsed, without its wish to upgrade."""
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join((first, *headers, b"\r\n"))

    def _count(self, num_bytes: int, num_headers: int = 0) -> None:
        """Counts what was parsed of a head or of trailers, which may not exceed the limits."""
        lines = self._lines
        assert lines is not None, "the parser gives a line where there is none"
        lines.num_parsed_bytes += num_bytes
        lines.num_headers += num_headers
        if lines.num_headers > MAX_HEADERS:
            self._raise(431, f"the request's head has more than the limit of {MAX_HEADERS} headers")
        if lines.num_parsed_bytes > MAX_HEAD_BYTES:
            self._raise(*_TOO_MANY_BYTES)

    def _raise(self, status: int, message: str) -> NoReturn:
        """LimitExceeded, which ends the parsing; `send_400_response` refuses what was parsed."""
        self._too_long = status, message
        raise LimitExceeded(message)

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection, with the refusal where one can be sent."""
        self._refused = True
        self._num_dropped_bytes = 0
        self._head_is_here()
        cycle = self.cycle
        waiting = cycle is not None and not cycle.response_complete
        if waiting and not self._in_body:
            cycle.keep_alive = False  # its answer, and those before it, come first; then the connection is closed
            return
        if self._in_body:  # of the request of `cycle`
            if self.pipeline or cycle.response_started:
                self.transport.close()  # what was sent now would be taken for another answer, or for part of one
                return
            cycle.disconnected = True
            cycle.message_event.set()
        answer = JSONResponse(error_body(message, status))
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body))))
        self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        self._num_dropped_bytes = 0
        self._waiting = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_head(self) -> None:
        self._head_is_here()
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


_warned_s = -math.inf


def _warn_of_descriptors(descriptor: int, limit: int) -> None:
    """Log that descriptors run out, at most once in TELL_AGAIN_S."""
    global _warned_s  # noqa: PLW0603 - the limit is the process's, and so is its log
    now = time.monotonic()
    if now - _warned_s < TELL_AGAIN_S:
        return
    _warned_s = now
    _log.error(
        "%d of at most %d descriptors (open files) are in use: further connections are refused with 503, or reset. "
        "Raise the limit by `ulimit -n`, systemd's LimitNOFILE=, or Docker's --ulimit nofile=",
        descriptor,
        limit,
    )


def _send_no_chunks(cycle: RequestResponseCycle) -> None:
    """For a client that knows none (RFC 9112, 6.1): an answer that names no length ends with its connection."""
    send = cycle.send
    ended_by_close = False

    async def sent(message: Any) -> None:
        nonlocal ended_by_close
        if message["type"] == "http.response.start":
            ended_by_close = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if ended_by_close:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif ended_by_close:
            cycle.expected_content_length = len(message.get("body", b""))  # of this piece; uvicorn compares
        await send(message)

    cycle.send = sent  # type: ignore[method-assign]
