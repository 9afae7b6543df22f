"""Heads of requests must come in time; what is being answered, and what waits for a next request, is left alone."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from service import connection

TIMEOUT_S, PAUSE_S = 0.3, 1
WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's body; at /early before it comes."""
    content = b"no" if scope["path"] == "/early" else await Request(scope, receive).body()
    await PlainTextResponse(content)(scope, receive, send)


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http=connection.Connection, lifespan="off", log_config=None, timeout_keep_alive=PAUSE_S)
        )
        serving = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()
        server.should_exit = True
        await serving


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n", b"GET"])
async def test_a_head_that_does_not_come(address: tuple[str, int], sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_the_second_head_is_waited_for_no_longer(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(20):
        writer.write(WHOLE + b"hi")
        assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HT")
        assert await reader.read() == b""
    writer.close()


async def test_what_comes_of_a_body_after_its_answer_holds_no_connection(address: tuple[str, int]) -> None:
    """Nor is it cut off while it comes: only a pause is too long."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(20):
        writer.write(WHOLE.replace(b"POST /", b"POST /early").replace(b"Length: 2", b"Length: 9"))
        assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 200")
        for _ in range(8):
            await asyncio.sleep(0.4 * PAUSE_S)
            writer.write(b"h")
        assert not reader.at_eof()
        assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_was_reset_is_held_by_no_timer(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.get_running_loop().create_future()
    connection_lost = connection.Connection.connection_lost

    def watched(self: connection.Connection, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set_result((exc, self.timeout_keep_alive_task))

    monkeypatch.setattr(connection.Connection, "connection_lost", watched)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(20):
        writer.write(WHOLE + b"hi")
        await reader.readuntil(b"\r\n\r\nhi")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        exc, timer = await lost
    assert isinstance(exc, ConnectionResetError)
    assert timer is None


async def test_a_body_and_a_pause_may_take_longer(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(20):
        for _ in range(2):
            writer.write(WHOLE)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 2 * TIMEOUT_S)
            writer.write(b"hi")
            assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 2 * TIMEOUT_S)
    writer.close()
