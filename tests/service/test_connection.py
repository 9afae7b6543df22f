"""Tests for the HTTP connection.

The head of a request must arrive in time and must not be too long. These limits do not end connections whose request is
being answered, nor connections that wait for the next request.
"""

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from service.http import connection

LostConnection = tuple[tuple[str, int], asyncio.Future[tuple[connection.Connection, Exception | None]]]
TIMEOUT_S, WAIT_S = 0.3, 60
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"


HANDLED: list[str] = []
"""Paths of the requests that the app has received."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the request's body, unless the path is one of the following.

    /early answers `no` before the body arrives. /late answers `TIMEOUT_S` seconds after the body has arrived. /lines
    answers with the names of the headers, and /host with the values of the Host headers. /stream sends the body twice,
    without a Content-Length. /left sends nothing and waits until the client disconnects. /fail raises an error.
    """
    HANDLED.append(scope["path"])
    if scope["path"] == "/fail":
        raise RuntimeError("the app fails")
    content = b"no" if scope["path"] == "/early" else await Request(scope, receive).body()
    if scope["path"] == "/late":
        await asyncio.sleep(TIMEOUT_S)
    if scope["path"] == "/left":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    if scope["path"] == "/lines":
        content = b",".join(name for name, _ in scope["headers"])
    if scope["path"] == "/host":
        content = b",".join(value for name, value in scope["headers"] if name == b"host")
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": content})
        return
    await PlainTextResponse(content)(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(pause_s: int = WAIT_S) -> AsyncIterator[tuple[str, int]]:
    """Run a server and yield its address. The server closes connections that are idle for `pause_s` seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=connection.Connection,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=pause_s,
                timeout_graceful_shutdown=1,
            )
        )
        running = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()
        server.should_exit = True
        await running


@pytest.fixture(scope="module")
async def shared_address() -> AsyncIterator[tuple[str, int]]:
    """Yield the address of one server for all tests, because a server takes 0.2 s to start and end."""
    async with serving() as server_address:
        yield server_address


@pytest.fixture
def address(shared_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the address of the server, which has long time limits."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", WAIT_S)
    return shared_address


@pytest.fixture
def hasty(shared_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the address of the server, which waits only `TIMEOUT_S` for a request's head."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", TIMEOUT_S)
    return shared_address


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n", b"GET"])
async def test_a_missing_head_ends_the_connection(hasty: tuple[str, int], sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(*hasty)
    writer.write(sent)
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()


async def test_the_second_head_has_the_same_time_limit(hasty: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*hasty)
    async with asyncio.timeout(WAIT_S):
        writer.write(WHOLE + b"hi")
        assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HT")
        assert await reader.read() == b""
    writer.close()


EARLY = WHOLE.replace(b"POST /", b"POST /early").replace(b"Length: 2", b"Length: %d")


async def test_a_body_after_its_answer_is_read_and_the_connection_stays_open() -> None:
    """Bodies may arrive in pieces or chunks. The limit applies to each body separately."""
    long = b"h" * (connection.MAX_DROPPED_BYTES * 2 // 3)
    chunks = b"1\r\nh\r\n" * 100
    early_chunks = CHUNKED.replace(b"POST /", b"POST /early")
    pieces = [(EARLY % 4, [b"h"] * 4), (early_chunks, [chunks, b"0\r\n", b"\r\n"]), *[(EARLY % len(long), [long])] * 2]
    async with serving(pause_s=1) as address, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*address)
        for head, body in pieces:
            writer.write(head)
            assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 200")
            for piece in body:
                await asyncio.sleep(0.01)
                writer.write(piece)
        await writer.drain()
        with pytest.raises(TimeoutError):  # the time limit for the next request starts at the last byte
            await asyncio.wait_for(reader.read(1), 0.2)
        writer.write(WHOLE + b"hi")
        assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("piece", [b"", b"h"])
async def test_a_body_that_never_ends_after_its_answer_ends_the_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S / 2):
        writer.write(EARLY % 100)
        assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 200")
        ended = asyncio.create_task(lost(reader))
        while not ended.done():
            writer.write(piece)
            await asyncio.sleep(0.05)
        assert await ended == b""
    writer.close()


async def test_an_endless_body_after_its_answer_ends_the_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", WAIT_S)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S / 2):
        writer.write(EARLY % 2**40)
        assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 200")
        ended = asyncio.create_task(lost(reader))
        num_bytes = await written(writer, b"h" * 2**14, ended)
        assert await ended == b""
    assert num_bytes > connection.MAX_DROPPED_BYTES
    writer.close()


@pytest.mark.parametrize(("further", "closes"), [(0, False), (1, True)])
async def test_the_response_to_a_body_that_will_not_be_read_says_that_the_connection_ends(
    address: tuple[str, int], further: int, closes: bool
) -> None:
    """A client that does not know it would send its next request on a connection that is about to be reset."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(EARLY % (connection.MAX_DROPPED_BYTES + further))
        assert (b"\r\nconnection: close\r\n" in await reader.readuntil(b"\r\n\r\nno")) is closes
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        (EARLY % 2**23).replace(b"Host: a", b"Host: a\r\nConnection: close"),
        (EARLY % 2**23).replace(b"HTTP/1.1", b"HTTP/1.0"),
        CHUNKED.replace(b"POST /", b"POST /early").replace(b"Host: a", b"Host: a\r\nConnection: close")
        + b"%x\r\n" % (2**23 - 7),
    ],
    ids=["close", "HTTP/1.0", "chunked"],
)
async def test_a_body_after_its_answer_is_read_before_the_connection_ends(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """A client that sends its whole request before it reads would lose the answer to a reset."""
    monkeypatch.setattr(connection, "LINGER_S", WAIT_S)
    reader, writer = await asyncio.open_connection(*address)
    body = b"h" * (2**23 - 7) + b"\r\n0\r\n\r\n"
    async with asyncio.timeout(WAIT_S / 2):
        writer.write(head)
        await asyncio.sleep(0.1)  # the answer and the end of a connection that does not linger
        writer.write(body)
        await writer.drain()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\nno")
    writer.close()


async def test_no_request_is_handled_after_a_response_has_ended_the_connection(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(WHOLE.replace(b"POST /", b"POST /fail"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500")
        assert b"connection: close" in head
        HANDLED.clear()
        writer.write(b"hi" + WHOLE.replace(b"POST /", b"POST /second") + b"hi")
        assert await reader.read() == b"Internal Server Error"
    assert HANDLED == []
    writer.close()


async def test_a_content_length_may_begin_with_many_zeros(address: tuple[str, int]) -> None:
    answer = await answers_to(
        address, WHOLE.replace(b"Length: 2", b"Length: " + b"0" * 5000 + b"2\r\nConnection: close") + b"hi"
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nhi")


async def test_too_many_small_chunks_end_the_connection_or_are_refused(address: tuple[str, int]) -> None:
    """The server ends the connection if it has sent the answer, and returns 413 if the app still reads the body."""
    chunk = b"1\r\nh\r\n"
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(CHUNKED.replace(b"POST /", b"POST /early"))
        assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 200")
        writer.write(chunk * (connection.MAX_SMALL_CHUNKS + 1000))
        assert await lost(reader) == b""
        writer.close()
        answer = await answers_to(address, CHUNKED + chunk * (connection.MAX_SMALL_CHUNKS + 1000))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"chunks of less than 16 bytes" in body
    assert b"the limit of 4096" in body


async def test_chunks_that_are_not_small_are_unlimited(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):  # the chunks of each body are counted separately
            count = connection.MAX_SMALL_CHUNKS
            writer.write(CHUNKED + b"1\r\nh\r\n" * (count - 1) + b"0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n" + b"h" * (count - 1))
            writer.write(CHUNKED + b"10\r\n0123456789abcdef\r\n" * (3 * count) + b"0\r\n\r\n")
            await reader.readuntil(b"0123456789abcdef" * (3 * count))
    writer.close()


@pytest.fixture
async def lost_connection(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LostConnection]:
    """Yield the address of a server of its own, and a future of its first lost connection and the error."""
    lost = asyncio.get_running_loop().create_future()
    connection_lost = connection.Connection.connection_lost
    async with serving() as own_address:

        def watched(self: connection.Connection, exc: Exception | None) -> None:
            connection_lost(self, exc)
            if self.server == own_address:
                lost.set_result((self, exc))

        monkeypatch.setattr(connection.Connection, "connection_lost", watched)
        yield own_address, lost


async def test_a_reset_connection_leaves_no_timer(lost_connection: LostConnection) -> None:
    address, lost = lost_connection
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(WHOLE + b"hi")
        await reader.readuntil(b"\r\n\r\nhi")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        served, exc = await lost
    assert isinstance(exc, ConnectionResetError)
    assert served.timeout_keep_alive_task is None


async def test_a_body_and_a_pause_may_take_longer_than_a_head(hasty: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*hasty)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            writer.write(WHOLE)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 2 * TIMEOUT_S)
            writer.write(b"hi")
            assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 2 * TIMEOUT_S)
    writer.close()


LONG = b"a" * connection.MAX_HEAD_BYTES
MANY = b"a:b\r\n" * connection.MAX_HEADERS
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
OVERLONG = {
    "headers": HEAD + MANY + b"\r\n",
    "headers without end": HEAD + MANY + b"a:b\r\n",
    "a value": HEAD + b"a: " + LONG + b"\r\n\r\n",
    "values": HEAD + (b"a: " + LONG[:1000] + b"\r\n") * 70 + b"\r\n",
    "a name": HEAD + LONG + b": a\r\n\r\n",
    "a URL": b"GET /" + LONG + b" HTTP/1.1\r\nHost: a\r\n\r\n",
}
UNENDED = {
    "a value": HEAD + b"a: ",
    "a name": HEAD,
    "a URL": b"GET /",
    "a trailer": CHUNKED + b"1\r\na\r\n0\r\na: ",
    "a trailer's name": CHUNKED + b"0\r\n",
}


@pytest.mark.parametrize("sent", OVERLONG.values(), ids=OVERLONG)
async def test_a_head_that_is_too_long_is_431(address: tuple[str, int], sent: bytes) -> None:
    assert_refused(await answers_to(address, sent), 431)


@pytest.mark.parametrize("first", UNENDED.values(), ids=UNENDED)
async def test_a_line_that_does_not_end_is_431(address: tuple[str, int], first: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)
    async with asyncio.timeout(WAIT_S):
        while not reader.at_eof():
            writer.write(LONG[: 1 << 14])  # the limit also applies to a line that arrives in pieces
            with contextlib.suppress(TimeoutError):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.01)
                break
        answer = head + await reader.read()
    writer.close()
    assert_refused(answer, 431)


@pytest.mark.parametrize(
    "trailers", [MANY + b"a:b\r\n", b"a: " + LONG + b"\r\n", (b"a: " + LONG[:1000] + b"\r\n") * 70]
)
async def test_trailers_that_are_too_long_are_431_or_end_the_connection(
    address: tuple[str, int], trailers: bytes
) -> None:
    assert_refused(await answers_to(address, CHUNKED + b"1\r\na\r\n0\r\n" + trailers + b"a:b\r\n" * 2), 431)
    behind_early = CHUNKED.replace(b"POST /", b"POST /early")
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(behind_early)
        await reader.readuntil(b"\r\n\r\nno")
        writer.write(b"0\r\n" + trailers + b"a:b\r\n" * 2)
        assert await lost(reader) == b"", "a second answer to one request"
    writer.close()


async def test_bytes_that_are_not_http_are_400(address: tuple[str, int]) -> None:
    assert_refused(await answers_to(address, b"hello\r\n\r\n"), 400)
    assert_refused(await answers_to(address, CHUNKED + b"x\r\n"), 400)


MISTAKEN = {
    "no host": (b"", b"no Host header"),
    "two hosts": (b"Host: 127.0.0.1\r\nHost: evil\r\n", b"2 Host headers"),
    "the same host twice": (b"Host: a\r\nHost: a\r\n", b"2 Host headers"),
    "two hosts, which offer an upgrade": (b"Host: a\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", b"2 Host"),
    **{
        f"the host {host.decode('latin-1')}": (b"Host: %s\r\n" % host, b"Host header must be a host name")
        for host in (
            b"a, b",
            b"a b",
            b"user@a",
            b"a/b",
            b"a:x",
            b"a?b",
            b"a%zz",
            b"[::1",
            b"[]",
            b"\xc3\xa9",
            b"http://a",
        )
    },
    "a folded host": (b"Host: a\r\n b\r\n", b"not valid HTTP"),
    "a space before the colon": (b"Host : a\r\n", b"not valid HTTP"),
    "a header without a colon": (b"Host: a\r\nb\r\n", b"not valid HTTP"),
    "a header without a name": (b"Host: a\r\n: b\r\n", b"not valid HTTP"),
    "a null byte": (b"Host: a\r\nb: \0\r\n", b"not valid HTTP"),
    "a carriage return": (b"Host: a\r\nb: c\rd\r\n", b"not valid HTTP"),
    "two lengths": (b"Host: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n", b"not valid HTTP"),
    **{
        f"the length {length.decode()}": (b"Host: a\r\nContent-Length: %s\r\n" % length, b"not valid HTTP")
        for length in (b"+2", b"-2", b"0x2", b"1 2", b"2, 2", b"2, 3", b"2_0", b"", b"9" * 30)
    },
    "chunks with a length": (b"Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n", b"not valid HTTP"),
    **{
        f"the coding {coding.decode()}": (b"Host: a\r\nTransfer-Encoding: %s\r\n" % coding, b"not valid HTTP")
        for coding in (b"gzip", b"chunked, gzip", b"chunked, chunked", b"xchunked", b"\x0bchunked", b"identity", b"")
    },
}


@pytest.mark.parametrize(("headers", "message"), MISTAKEN.values(), ids=MISTAKEN)
async def test_headers_that_servers_may_read_in_two_ways_are_refused(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, headers: bytes, message: bytes
) -> None:
    """RFC 9112 demands status 400 for each of them (3.2, 5.1, 5.2, 6.1, 6.3), and the body must not be a request."""
    caplog.set_level(logging.INFO, "service.http.connection")
    smuggled = b"GET /lines HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = await answers_to(address, b"POST /lines HTTP/1.1\r\n" + headers + b"\r\n" + smuggled)
    assert_refused(answer, 400)
    assert message in answer
    assert answer.count(b"\r\n\r\n") == 1
    (record,) = (record for record in caplog.records if record.name == "service.http.connection")
    assert message.decode() in record.getMessage()


async def test_chunks_of_a_client_of_http_1_0_are_refused(address: tuple[str, int]) -> None:
    sent = CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n"
    assert_refused(await answers_to(address, sent), 400)


@pytest.mark.parametrize(
    "host", [b"", b"a", b"A.b-c_d:80", b"a:", b"%41", b"127.0.0.1:1", b"[::1]", b"[::1]:8000", b"a \t"]
)
async def test_valid_hosts_are_accepted(address: tuple[str, int], host: bytes) -> None:
    sent = WHOLE.replace(b"Host: a", b"Host: %s\r\nConnection: close" % host)
    assert (await answers_to(address, sent + b"hi")).startswith(b"HTTP/1.1 200")


async def test_the_host_of_a_url_replaces_the_host_header(address: tuple[str, int]) -> None:
    """The header must be ignored (RFC 9112, 3.2.2). Which host a check reads would otherwise matter."""
    head = b"POST http://%s/host HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    assert (await answers_to(address, head % b"evil:1")).endswith(b"\r\n\r\nevil:1")
    assert_refused(await answers_to(address, head % b"user@evil"), 400)


async def test_heads_just_below_the_limit_are_accepted(address: tuple[str, int]) -> None:
    """The server counts each head on a connection separately, although a head takes several reads."""
    reader, writer = await asyncio.open_connection(*address)
    values = (b"a: " + b"b" * 200 + b"\r\n") * (connection.MAX_HEADERS - 2)
    url = b"/" + b"c" * 12_000
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            head = WHOLE.replace(b"/ ", url + b" ").replace(b"\r\n\r\n", b"\r\n" + values + b"\r\n")
            assert len(head) > 0.97 * connection.MAX_HEAD_BYTES
            for start in range(0, len(head), 20_000):
                writer.write(head[start : start + 20_000])
                await asyncio.sleep(0.01)
            writer.write(b"hi")
            assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_chunks_do_not_count_as_lines_and_trailers_do_not_become_headers(address: tuple[str, int]) -> None:
    """Chunks may be long, and the size of a chunk may arrive before its data."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            writer.write(CHUNKED)
            for _ in range(2 * connection.MAX_HEADERS):
                writer.write(b"400\r\n" + b"a" * 500)
                await asyncio.sleep(0)
                writer.write(b"a" * 524 + b"\r\n")
            writer.write(b"0\r\nx-request-id: a\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n" + b"a" * 1024 * 2 * connection.MAX_HEADERS)
            assert answer.startswith(b"HTTP/1.1 200")
        writer.write(CHUNKED.replace(b"/", b"/lines", 1) + b"0\r\nx-request-id: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nhost,transfer-encoding")
        long_chunk = LONG * 4
        writer.write(CHUNKED + b"%x\r\n" % len(long_chunk))
        for start in range(0, len(long_chunk), 10_000):
            writer.write(long_chunk[start : start + 10_000])
            await asyncio.sleep(0.001)
        writer.write(b"\r\n0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), "the trailer is among the headers"
        assert await reader.readexactly(len(long_chunk)) == long_chunk
    writer.close()


@pytest.mark.parametrize("last", [*OVERLONG.values(), b"hello\r\n\r\n"], ids=[*OVERLONG, "no HTTP"])
async def test_pending_answers_are_sent_before_the_connection_ends(address: tuple[str, int], last: bytes) -> None:
    late = WHOLE.replace(b"/", b"/late", 1)
    answer = await answers_to(address, late + b"hi" + late + b"ho" + last)
    first, second = answer.split(b"HTTP/1.1 200 OK")[1:]
    assert first.endswith(b"\r\n\r\nhi")
    assert second.endswith(b"\r\n\r\nho")


async def test_too_many_pipelined_requests_end_the_connection(address: tuple[str, int]) -> None:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(WHOLE.replace(b"/", b"/late", 1) + b"hi" + (WHOLE + b"ho") * 2 * connection.MAX_PIPELINED)
        answer = await lost(reader)
    writer.close()
    assert answer.count(b"HTTP/1.1 200 OK") == 1 + connection.MAX_PIPELINED
    assert answer.endswith(b"\r\n\r\nho")


async def test_pipelined_requests_up_to_the_limit_are_answered_repeatedly(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            writer.write((WHOLE + b"hi") * connection.MAX_PIPELINED)
            for _ in range(connection.MAX_PIPELINED):
                assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_closed_connection_ends_its_request(lost_connection: LostConnection) -> None:
    address, lost = lost_connection
    _, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(WHOLE.replace(b"/", b"/left", 1) + b"hi")
        await asyncio.sleep(0.1)
        writer.close()
        served, _ = await lost
        await asyncio.gather(*served.tasks)


async def test_pipelined_requests_may_come_in_pieces(hasty: tuple[str, int]) -> None:
    """A head may arrive in pieces while earlier answers take longer than the time limit for a head."""
    late = WHOLE.replace(b"/", b"/late", 1)
    sent = late + b"hi" + late + b"ho" + WHOLE + b"he" + WHOLE + b"hu"
    cuts = [len(2 * late) + 4 + cut for cut in (-1, 0, 10, len(WHOLE), len(WHOLE) + 1, len(WHOLE) + 3)]

    async def assert_answered(cut: int) -> None:
        reader, writer = await asyncio.open_connection(*hasty)
        writer.write(sent[:cut])
        await asyncio.sleep(0.1)
        for start in range(cut, len(sent), 20):
            writer.write(sent[start : start + 20])
            await asyncio.sleep(0)
        for body in (b"hi", b"ho", b"he", b"hu"):
            assert (await reader.readuntil(b"\r\n\r\n" + body)).startswith(b"HTTP/1.1 200")
        writer.close()

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(assert_answered, cuts))


async def test_a_missing_head_after_a_request_ends_the_connection(hasty: tuple[str, int]) -> None:
    async with asyncio.timeout(WAIT_S / 2):  # shorter than the time limit for an idle connection
        answer = await answers_to(hasty, WHOLE.replace(b"/", b"/late", 1) + b"hi" + WHOLE + b"ho" + WHOLE[:20])
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.endswith(b"\r\n\r\nho")


async def test_a_half_closed_connection_ends_its_request(address: tuple[str, int]) -> None:
    """The server treats a half-closed connection as closed, because both look the same to the server."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(WHOLE.replace(b"/", b"/left", 1) + b"hi")
        await asyncio.sleep(0.05)
        writer.write_eof()
        assert await reader.read() == b""
    writer.close()


OFFER = b"Host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
H2C = OFFER % b"h2c"
NEXT = b"GET /lines HTTP/1.1\r\nHost: a\r\nb: c\r\n\r\n"
OFFERED = {
    "length": b"POST / HTTP/1.1\r\n" + H2C + b"Content-Length: 2\r\n\r\nhi",
    "chunks": b"POST / HTTP/1.1\r\n"
    + H2C
    + b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\nUpgrade: h2c\r\n\r\n",
    "no body": b"GET / HTTP/1.1\r\n" + H2C + b"\r\n",
}


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"foo"])
async def test_an_upgrade_offer_is_ignored(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, protocol: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(b"GET /lines HTTP/1.1\r\n" + OFFER % protocol + b"\r\n")
        await reader.readuntil(b"\r\n\r\nhost,connection,http2-settings")
        writer.write(NEXT)
        await reader.readuntil(b"\r\n\r\nhost,b")
    writer.close()
    # Another test in this process may have enabled uvicorn's access log.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("offered", OFFERED.values(), ids=OFFERED)
async def test_a_request_that_offers_an_upgrade_is_read_like_any_other(
    address: tuple[str, int], offered: bytes
) -> None:
    """The request is read correctly no matter how it is split into packets."""
    body = b"" if offered.startswith(b"GET") else b"hi"
    sent = offered + NEXT.replace(b"b: c", b"Connection: close")

    async def assert_answered(*packets: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address)
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0.02 if len(packets) == 2 else 0)
        first, second = (await reader.read()).split(b"HTTP/1.1 200 OK")[1:]
        writer.close()
        assert first.endswith(b"\r\n\r\n" + body)
        assert second.endswith(b"\r\n\r\nhost,connection")

    async with asyncio.timeout(WAIT_S):
        await assert_answered(sent)
        await assert_answered(*(bytes([byte]) for byte in sent))
        await asyncio.gather(*(assert_answered(sent[:stop], sent[stop:]) for stop in range(1, len(sent))))


@pytest.mark.parametrize("protocol", [b"h2c", b"foo"])
async def test_the_body_of_a_request_that_offers_an_upgrade_is_not_read_as_a_request(
    address: tuple[str, int], protocol: bytes
) -> None:
    head = b"POST / HTTP/1.1\r\n" + OFFER % protocol + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(NEXT)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(head)
        await asyncio.sleep(0.1)
        writer.write(NEXT)
        answer = await reader.read()
    writer.close()
    for one in (answer, await answers_to(address, head + NEXT)):
        assert one.count(b"HTTP/1.1 200 OK") == 1
        assert one.endswith(b"\r\n\r\n" + NEXT)


async def test_requests_that_offer_an_upgrade_obey_their_content_length(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            writer.write(OFFERED["length"] * connection.MAX_PIPELINED)
            for _ in range(connection.MAX_PIPELINED):
                assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
    writer.close()
    offered = b"POST / HTTP/1.1\r\n" + H2C
    assert_refused(await answers_to(address, offered + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nhi"), 400)
    assert_refused(
        await answers_to(address, offered + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nhi"), 400
    )


async def test_connect_is_refused(address: tuple[str, int]) -> None:
    for target in (b"a:443", b"/"):
        head = b"CONNECT " + target + b" HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(NEXT)
        assert_refused(await answers_to(address, head + NEXT), 400)


@pytest.mark.parametrize("version", [b"1.0", b"0.9", b"2.0"])
async def test_a_client_of_another_http_version_gets_no_chunks(address: tuple[str, int], version: bytes) -> None:
    """The server ends the answer by closing the connection, although the client asked for keep-alive."""
    head = b"%s HTTP/" + version + b"\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n"
    answer = await answers_to(address, head % b"POST /stream" + b"hi")
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in lines
    assert b"connection: close" in lines.split(b"\r\n")
    assert body == b"hihi"
    lines, _, body = (await answers_to(address, head % b"HEAD /stream" + b"hi")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in lines
    assert body == b""


async def test_a_client_of_http_1_1_gets_chunks(hasty: tuple[str, int]) -> None:
    answer = await answers_to(hasty, WHOLE.replace(b"POST /", b"POST /stream") + b"hi" + HEAD + LONG)
    assert b"transfer-encoding: chunked" in answer
    assert answer.endswith(b"\r\n\r\n2\r\nhi\r\n2\r\nhi\r\n0\r\n\r\n")


async def answers_to(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes and return everything received until the connection ends."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(WAIT_S):
        writer.write(sent)
        answer = await reader.read()
    writer.close()
    return answer


async def written(writer: asyncio.StreamWriter, piece: bytes, ended: asyncio.Task[bytes]) -> int:
    """Write a piece repeatedly until the connection ends, and return the number of bytes written."""
    num_bytes = 0
    with contextlib.suppress(ConnectionError):
        while not ended.done():
            writer.write(piece)
            await writer.drain()
            num_bytes += len(piece)
            await asyncio.sleep(0)
    return num_bytes


async def lost(reader: asyncio.StreamReader) -> bytes:
    """Return everything received until the connection ends or is reset."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            answer += piece
    return answer


def assert_refused(answer: bytes, status: int) -> None:
    """Assert that the answer has the status, an error object and the header `Connection: close`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.split(b"\r\n")
    error = json.loads(body)["error"]
    assert error["code"] == status
    assert ("limit" in error["message"]) == (status == 431)
