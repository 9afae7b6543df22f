"""Connections that only wait keep nobody else out: bodies that pause end in time, and connections may be many."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from mindie_mm.settings.config import ServiceConfig
from service import middleware
from service.http import errors
from service.http.connection import Connection
from service.middleware import Middleware
from service.request.admission import Admission
from service.telemetry.metrics import Metrics
from tests.warm import Popen
from tools.serving import running_service

IDLE_S = 1.0
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Asked(BaseModel):
    """A body."""

    a: str


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """Of what answers with the body's `a`."""
    monkeypatch.setattr(middleware, "BODY_IDLE_S", IDLE_S)
    app = FastAPI()

    @app.post("/")
    async def answer(asked: Asked) -> str:
        return asked.a

    app.add_middleware(Middleware, config=ServiceConfig(), admission=Admission(9, 60), metrics=Metrics("x"))
    errors.install(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None))
        serving = asyncio.create_task(running.serve([listener]))
        yield listener.getsockname()
        running.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """For 20 s at most."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(120):
            yield reader, writer
    finally:
        writer.close()  # else the server would wait for it when a test fails


@pytest.mark.parametrize("sent", [b"Content-Length: 5\r\n\r\n", b'Content-Length: 5\r\n\r\n{"a"'])
@pytest.mark.parametrize("number", ["first", "second"])
async def test_a_body_that_pauses_ends_its_connection(address: tuple[str, int], sent: bytes, number: str) -> None:
    async with connected(address) as (reader, writer):
        if number == "second":
            writer.write(HEAD + b'Content-Length: 9\r\n\r\n{"a":"b"}')
            assert (await reader.readuntil(b'"b"')).startswith(b"HTTP/1.1 200")
        writer.write(HEAD + sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["message"] == "the request body paused for longer than the limit of 1 s"
    assert error["type"] == "TimeoutError"


async def test_a_chunked_body_that_pauses(address: tuple[str, int]) -> None:
    async with connected(address) as (reader, writer):
        writer.write(HEAD + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n')
        assert (await reader.read()).startswith(b"HTTP/1.1 408")


async def test_a_slow_body_is_taken(address: tuple[str, int]) -> None:
    """Each pause is short, all together are not; and afterwards the connection may wait."""
    async with connected(address) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 9\r\n\r\n")
        for piece in (b'{"a', b'":', b'"b', b'"}'):
            await asyncio.sleep(0.3)
            writer.write(piece)
        assert (await reader.readuntil(b'"b"')).startswith(b"HTTP/1.1 200")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.2 * IDLE_S)


def test_connections_may_be_as_many_as_the_hard_limit_grants(settings: dict[str, object], tmp_path: Path) -> None:
    start: Any = partial(Popen, max_open_files=512)
    with running_service(settings | {"spool": tmp_path}, tmp_path / "log", start=start) as service:
        soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 512
