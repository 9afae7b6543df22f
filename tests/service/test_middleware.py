"""Tests for the limits on each request body and on all request bodies together."""

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from mindie_mm.settings.config import ServiceConfig
from service.http.clients import Clients
from service.middleware import Middleware
from service.request.admission import Admission
from service.telemetry.metrics import Metrics

ADMISSION = Admission(limit=9, timeout_s=60)


class Inside:
    """An application that reads the body and then waits until `go` is set."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        self.read.set()
        await self.go.wait()


def call(middleware: Middleware, body: bytes, headers: Any = ()) -> Any:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    return middleware({"type": "http", "method": "POST", "path": "/none", "headers": headers}, receive, send)


@pytest.mark.parametrize("announced", [True, False])
async def test_the_bodies_of_all_requests_share_a_limit(announced: bool) -> None:
    inside = Inside()
    middleware = Middleware(
        inside,
        config=ServiceConfig(max_request_bytes=100, max_held_bytes=150),
        clients=Clients(ServiceConfig()),
        admission=ADMISSION,
        metrics=Metrics("x"),
    )
    first = asyncio.create_task(call(middleware, bytes(100)))
    await inside.read.wait()
    headers = [(b"content-length", b"51")] if announced else []
    with pytest.raises(HTTPException, match="would total 151 bytes; the limit is 150") as caught:
        await call(middleware, bytes(51), headers)
    assert caught.value.status_code == 429
    assert middleware.held_bytes == 100
    inside.go.set()
    await call(middleware, bytes(50))
    await first
    await call(middleware, bytes(100))
    assert middleware.held_bytes == 0


async def test_refused_bodies_are_not_held() -> None:
    config = ServiceConfig(max_request_bytes=100, max_request_values=10)
    middleware = Middleware(
        Inside(), config=config, clients=Clients(ServiceConfig()), admission=ADMISSION, metrics=Metrics("x")
    )
    for body, limit in ((b"," * 11, "JSON values than the limit of 10"), (bytes(101), "the limit is 100")):
        with pytest.raises(HTTPException, match=limit):
            await call(middleware, body)
        assert middleware.held_bytes == 0


async def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    middleware = Middleware(
        Inside(),
        config=ServiceConfig(request_timeout_s=0.05),
        clients=Clients(ServiceConfig()),
        admission=ADMISSION,
        metrics=Metrics("x"),
    )
    with pytest.raises(HTTPException, match=r"limit of 0\.05 s") as caught:
        await middleware({"type": "http", "method": "POST", "path": "/none", "headers": []}, never, send)
    assert caught.value.status_code == 408
