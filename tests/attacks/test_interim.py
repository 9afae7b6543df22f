"""Attacks by media servers that send endless interim responses (status 1xx)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from mindie_mm.errors import MediaError
from mindie_mm.media.fetch.http import fetch
from mindie_mm.media.fetch.http_connector import MAX_INTERIM

FINAL = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"


@pytest.mark.parametrize("interim", [HINTS, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 199 \r\n\r\n"])
@pytest.mark.parametrize("at_once", [1, 1000])
async def test_endless_interim_answers_are_refused(interim: bytes, at_once: int) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(interim * at_once)
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(answer) as url:
        with pytest.raises(MediaError, match=f"more interim responses than the limit of {MAX_INTERIM}"):
            await fetch(url, max_bytes=100, timeout_s=20, allow_private=True)


async def test_interim_answers_up_to_the_limit_are_accepted() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HINTS * MAX_INTERIM + FINAL + b"media")

    async with serving(answer) as url:
        assert await fetch(url, max_bytes=100, timeout_s=20, allow_private=True) == b"media"


async def test_one_interim_answer_above_the_limit_is_refused() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HINTS * (MAX_INTERIM + 1) + FINAL + b"media")

    async with serving(answer) as url:
        with pytest.raises(MediaError, match="interim"):
            await fetch(url, max_bytes=100, timeout_s=20, allow_private=True)


@asynccontextmanager
async def serving(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """Yield the URL of a server that answers each request with `answer`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
