"""The uvicorn connection of the service, with limits on request heads, chunks and pipelining."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mindie_mm.errors import InputError, LimitExceeded, RequestAborted
from service.http.errors import error_body
from service.http.host import set_host
from service.http.json_response import JSONResponse

HEAD_TIMEOUT_S = 10.0
"""Maximum time in seconds for a request's head, counted from the start of the connection or from the first byte.

A TLS handshake may take as long, and precedes this time.
"""
MAX_HEAD_BYTES = 64 * 2**10
"""Maximum size of a request's head with its URL, and of the trailers of a chunked body."""
MAX_HEADERS = 256
"""Maximum number of headers in a head, and of trailers after a body."""
MAX_PIPELINED = 64
"""Maximum number of pipelined requests that wait on one connection. Further requests get no answer."""
MAX_SMALL_CHUNKS = 4096
"""Maximum number of chunks in a body, in addition to one chunk per `SMALL_CHUNK_BYTES` of the body.

Parsing a chunk takes as long as parsing about a thousand bytes.
"""
SMALL_CHUNK_BYTES = 16
LINGER_S = 2.0
"""After a response, a connection continues to read an incomplete request body for this time in seconds.

The client can thus read the response before the connection is reset. If the body ends in time, the connection can be
reused.
"""
MAX_DROPPED_BYTES = 2**26
"""Maximum number of bytes to read and drop within `LINGER_S`. Many clients send a whole request before they read."""
CHUNK_BYTES = 1024
"""Number of bytes to add to the count of dropped bytes for each chunk."""

MOST_RESERVED_DESCRIPTORS = 64
"""Number of file descriptors that connections leave free for files and processes.

If the limit of open files is low, an eighth of the limit is left free instead.
"""
TELL_AGAIN_S = 60.0
"""Minimum time in seconds between two log records that say that descriptors are scarce."""

_log = logging.getLogger(__name__)

_TOO_MANY_BYTES = (431, f"the request header section is longer than the limit of {MAX_HEAD_BYTES} bytes")


@dataclass(slots=True)
class _Lines:
    """Counts for the head or the trailers that are being received. Both counts of bytes are lower bounds."""

    num_headers: int = 0
    num_parsed_bytes: int = 0
    """Size of the URL and of all complete headers."""
    num_read_bytes: int = 0
    """Size of all reads that lie completely within the head or the trailers. Incomplete headers are included."""


class Connection(HttpToolsProtocol):
    """A uvicorn connection that limits the duration and the size of request heads.

    - The connection is closed if a head does not arrive in time. The pause between two requests is limited by uvicorn.
    - A head that is too long gets status 431. Bytes that are not HTTP, and a Host header that is missing, repeated or
      malformed, get status 400. Then the connection is closed. If earlier requests are still being answered, it is
      closed after the last answer instead.
    - An Upgrade header is ignored (RFC 9110, 7.8).
    - A response of unknown length to an HTTP/1.0 client is not chunked. The end of the connection marks its end.
    - If a request is answered before its body is complete, only a little more of the body is read before the connection
      is closed. If the body is known to be longer, the response has the header `Connection: close`.
    - Near the limit of open files, a new connection gets status 503, and the log says which limit to raise.
    - `scope["state"]["unix_socket"]` tells whether the connection came through a Unix socket.
    - While a pipelined request waits for an earlier answer, uvicorn does not read. A disconnect is noticed only by
      reading, so the earlier request is answered in full even if the client has disconnected.
    """

    _waiting: asyncio.TimerHandle | None = None
    _lines: _Lines | None = None
    """Counts for the current head or trailers. None within a body and between requests."""
    _in_body: bool = False
    """True if a request's head is complete, but its body is not."""
    _num_body_bytes: int = 0
    _num_announced_bytes: int = 0
    """Content-Length of the request whose body arrives. 0 without this header."""
    _closes_after_body: bool = False
    """True if the connection must be closed after the body that arrives, because its response said so."""
    _num_chunks: int = 0
    _reason: tuple[int, str] | None = None
    """Status and message of the refusal if one of the checks of this class fails."""
    _refused: bool = False
    """True if a refusal has stopped the parsing."""
    _num_dropped_bytes: int = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        # A new descriptor has the lowest free number, so all lower numbers are in use. If no descriptor is left, libuv
        # resets new connections.
        descriptor = transport.get_extra_info("socket").fileno()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptor >= limit - min(MOST_RESERVED_DESCRIPTORS, limit // 8):
            _warn_of_descriptors(descriptor, limit)
            self._refuse(
                503, f"the service has too many connections; its limit of open files is {limit}. Try again later"
            )

    def data_received(self, data: bytes) -> None:
        if self._refused or self._in_answered_body:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()
                return
        if self._refused:
            return
        lines = self._lines
        self._parse(data)
        if lines is not None and lines is self._lines and not self._refused:
            lines.num_read_bytes += len(data)
            if lines.num_read_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_MANY_BYTES)
        # uvicorn cancels its keep-alive timer when data arrive. Restart the timer if `data` completed the body of a
        # request that has already been answered.
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._waiting is None and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        if self.transport.is_closing():
            raise RequestAborted("the connection ends before this request")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise LimitExceeded(
                f"more pipelined requests than the limit of {MAX_PIPELINED} are waiting for an earlier response"
            )
        super().on_message_begin()
        self.scope["state"]["unix_socket"] = self.transport.get_extra_info("socket").family == socket.AF_UNIX
        self._lines = _Lines()
        if self.cycle is None or self.cycle.response_complete:  # otherwise uvicorn may have paused reading
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), num_headers=1)
        if not self._in_body:  # trailers are not request headers (RFC 9110, 6.5.1), and no route uses them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("CONNECT is not supported")
            return  # `_parse` parses the request again, without the Upgrade header
        version = self.parser.get_http_version()
        try:
            set_host(self.headers, self.url, version)
        except InputError as error:
            self._raise(400, str(error))
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            # A proxy may read such a body in another way (RFC 9112, 6.1).
            self._raise(400, "the request has the header Transfer-Encoding, which HTTP/1.0 does not have")
        # Python converts at most 4,300 digits, and the parser accepts any number of zeros in front.
        lengths = (int(value.lstrip(b"0") or b"0") for name, value in self.headers if name == b"content-length")
        self._num_announced_bytes = next(lengths, 0)
        self._head_is_here()
        self._lines = None
        self._in_body = True
        self._num_body_bytes = self._num_chunks = 0
        super().on_headers_complete()
        self._linger_after_early_response(self.cycle)
        if self.scope["http_version"] != "1.1":
            _send_no_chunks(self.cycle)

    def on_chunk_header(self) -> None:
        """Count a chunk. The parser calls this method also before trailers, for which there is no other callback."""
        self._lines = _Lines()
        self._num_chunks += 1
        self._num_dropped_bytes += CHUNK_BYTES
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_body_bytes // SMALL_CHUNK_BYTES:
            self._raise(
                413,
                f"the request body has more chunks of less than {SMALL_CHUNK_BYTES} bytes than the limit of "
                f"{MAX_SMALL_CHUNKS}; send larger chunks",
            )

    def on_body(self, body: bytes) -> None:
        self._lines = None
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._in_answered_body:
            self._head_is_here()  # stop lingering, because the connection can be reused
            if self._closes_after_body:
                self.transport.close()
        self._lines = None
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._closes_after_body and not self._in_body:  # the body ended while the last piece waited to be sent
            self.transport.close()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_answered_body:
            self._unset_keepalive_if_required()
            if self.cycle.scope["http_version"] != "1.1" and self.transport.can_write_eof():
                self.transport.write_eof()  # it may mark the end of the response
            self._linger()
        elif self.cycle.response_complete and self._lines is not None:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse the request. uvicorn calls this method if the parser fails or if one of the callbacks above raises."""
        self._refuse(*(self._reason or (400, "the request is not valid HTTP")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._unset_keepalive_if_required()  # after a reset, uvicorn's timer would keep this object alive
        super().connection_lost(exc)

    def drain(self) -> None:
        """Close the connection: at once if it is idle between two requests, or else after the pending answer.

        A connection that is new or is receiving a request's head stays open until that request has been answered.
        """
        if self.cycle is None or (self.cycle.response_complete and self._lines is not None):
            return
        self.shutdown()

    @property
    def _in_answered_body(self) -> bool:
        """True if a request has been answered and the rest of its body is still arriving."""
        return self._in_body and self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        """Parse `data` as uvicorn does, but remove the Upgrade header of a request and parse the request again.

        httptools stops after a head with an Upgrade header, and treats the body as another protocol (httptools issue
        124).
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)  # the old parser may still expect a body
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except HttpParserError:
                self.send_400_response("")
                return

    def _without_upgrade(self) -> bytes:
        """Return the head that was just parsed, without its Upgrade header."""
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join((first, *headers, b"\r\n"))

    def _count(self, num_bytes: int, num_headers: int = 0) -> None:
        """Count parsed parts of a head or of trailers. Raise LimitExceeded if a limit is exceeded."""
        lines = self._lines
        assert lines is not None, "the parser reports a header only inside a header section"
        lines.num_parsed_bytes += num_bytes
        lines.num_headers += num_headers
        if lines.num_headers > MAX_HEADERS:
            self._raise(431, f"the request has more headers than the limit of {MAX_HEADERS}")
        if lines.num_parsed_bytes > MAX_HEAD_BYTES:
            self._raise(*_TOO_MANY_BYTES)

    def _raise(self, status: int, message: str) -> NoReturn:
        """Raise LimitExceeded to end the parsing. `send_400_response` then sends the refusal."""
        self._reason = status, message
        raise LimitExceeded(message)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error response, and end the connection.

        No response is sent if the client would mistake it for the response to another request, or for part of one.
        """
        if self.transport.is_closing():
            self._refused = True
            return
        _log.info("a request was refused with status %d: %s", status, message)  # it gets no line in the access log
        self._refused = True
        self._num_dropped_bytes = 0
        self._head_is_here()
        cycle = self.cycle
        waiting = cycle is not None and not cycle.response_complete
        if waiting and not self._in_body:
            cycle.keep_alive = False  # the connection is closed after the remaining answers
            return
        if self._in_body:  # that is, in the body of the request that `cycle` answers
            if self.pipeline or cycle.response_started:
                self.transport.close()  # the client would mistake the refusal for another answer, or a part of one
                return
            cycle.disconnected = True
            cycle.message_event.set()
        answer = JSONResponse(error_body(message, status))
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body))))
        if self.transport.can_write_eof():  # a TLS connection cannot be closed in one direction
            self.transport.write_eof()
        self._linger()

    def _linger_after_early_response(self, cycle: RequestResponseCycle) -> None:
        """Keep uvicorn from closing the connection while the body of an answered request arrives.

        Unread bytes would reset the connection, and the client might lose the response.
        """
        send = cycle.send

        async def sent(message: Any) -> None:
            if self._in_body and self.cycle is cycle:
                rest = self._num_announced_bytes - self._num_body_bytes
                if message["type"] == "http.response.start" and rest > MAX_DROPPED_BYTES:
                    message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
                elif message["type"] == "http.response.body" and not message.get("more_body", False):
                    self._closes_after_body = not cycle.keep_alive
                    cycle.keep_alive = True
            await send(message)

        cycle.send = sent  # type: ignore[method-assign]

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
    """Log that descriptors are running out, at most once in `TELL_AGAIN_S`."""
    global _warned_s  # noqa: PLW0603 - the limit and the log belong to the process
    now = time.monotonic()
    if now - _warned_s < TELL_AGAIN_S:
        return
    _warned_s = now
    _log.error(
        "%d of at most %d descriptors (open files) are in use: further connections are refused with 503 or "
        "reset. Raise the limit with `ulimit -n`, systemd's LimitNOFILE=, or Docker's --ulimit nofile=",
        descriptor,
        limit,
    )


def _send_no_chunks(cycle: RequestResponseCycle) -> None:
    """Send a response of unknown length without chunks, and close the connection at its end (RFC 9112, 6.1)."""
    send = cycle.send
    ended_by_close = False

    async def sent(message: Any) -> None:
        nonlocal ended_by_close
        if message["type"] == "http.response.start":
            ended_by_close = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if ended_by_close:
                cycle.chunked_encoding = cycle.keep_alive = False
        elif ended_by_close:
            cycle.expected_content_length = len(
                message.get("body", b"")
            )  # uvicorn compares this number with the size of the piece
        await send(message)

    cycle.send = sent  # type: ignore[method-assign]
