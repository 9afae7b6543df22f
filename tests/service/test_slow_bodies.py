"""Tests that slow request bodies time out, and that the service raises its limit of open files."""

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
from service.http.clients import Clients
from service.http.connection import Connection
from service.middleware import Middleware
from service.request.admission import Admission
from service.telemetry.metrics import Metrics
from tests.warm import Popen
from tools.serving import running_service

pytestmark = pytest.mark.slow

IDLE_S = 1.0
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Body(BaseModel):
    a: str


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """Yield the address of a server that answers with the field `a` of the body."""
    monkeypatch.setattr(middleware, "BODY_IDLE_S", IDLE_S)
    app = FastAPI()

    @app.post("/")
    async def answer(asked: Body) -> str:
        return asked.a

    config = ServiceConfig()
    front = {"config": config, "clients": Clients(config), "admission": Admission(9, 60), "metrics": Metrics("x")}
    app.add_middleware(Middleware, **front)
    errors.install(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None))
        serving = asyncio.create_task(running.serve([listener]))
        yield listener.getsockname()
        running.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def connect(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to the server. Raise TimeoutError if the `with` block takes more than 120 s."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(120):
            yield reader, writer
    finally:
        writer.close()  # if a test fails, the server would otherwise wait for this connection


@pytest.mark.parametrize("sent", [b"Content-Length: 5\r\n\r\n", b'Content-Length: 5\r\n\r\n{"a"'])
@pytest.mark.parametrize("number", ["first", "second"])
async def test_a_body_that_pauses_is_408_and_ends_its_connection(
    address: tuple[str, int], sent: bytes, number: str
) -> None:
    async with connect(address) as (reader, writer):
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


async def test_a_chunked_body_that_pauses_is_408(address: tuple[str, int]) -> None:
    async with connect(address) as (reader, writer):
        writer.write(HEAD + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n')
        assert (await reader.read()).startswith(b"HTTP/1.1 408")


async def test_a_slow_body_with_short_pauses_is_accepted(address: tuple[str, int]) -> None:
    """Only the sum of the pauses exceeds the limit. After the answer, the connection may be idle for longer."""
    async with connect(address) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 9\r\n\r\n")
        for piece in (b'{"a', b'":', b'"b', b'"}'):
            await asyncio.sleep(0.3)
            writer.write(piece)
        assert (await reader.readuntil(b'"b"')).startswith(b"HTTP/1.1 200")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.2 * IDLE_S)


def test_the_limit_of_open_files_is_raised_to_the_hard_limit(settings: dict[str, object], tmp_path: Path) -> None:
    start: Any = partial(Popen, max_open_files=512)
    with running_service(settings | {"spool": tmp_path}, tmp_path / "log", start=start) as service:
        soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 512
