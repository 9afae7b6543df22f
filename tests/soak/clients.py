"""Clients of a soak test: complete requests, canceled requests, oversized bodies and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.soak.mix import MAX_REQUEST_BYTES, Case

VOLATILE = frozenset(
    {"id", "created", "timings", "prompt_tokens_details", "prefill_time", "decode_time", "seed", "top_logprobs"}
)
"""Fields that may differ between two equal answers. For example, tokens of equal probability may change their order."""
RECEIVE_BYTES = 16384
"""Size in bytes of the receive buffer of a slow reader's socket."""


def essence(value: Any) -> Any:
    """Return an answer without the fields that may differ between equal answers."""
    if isinstance(value, dict):
        return {name: essence(part) for name, part in value.items() if name not in VOLATILE}
    return [essence(part) for part in value] if isinstance(value, list) else value


def alike(one: Any, other: Any) -> bool:
    """Return whether two results of `essence` are equal.

    Numbers may differ slightly, because they depend on the batch.
    """
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def joined(events: list[dict[str, Any]]) -> Any:
    """Return the essence of a stream: the text and finish reason of each choice, or the first error."""
    found: dict[Any, list[Any]] = {}
    for event in events:
        if "error" in event:
            return event
        if event.get("generated_text") is not None:
            found["generated_text"] = [essence(event["generated_text"]), essence(event.get("details"))]
        if event.get("usage"):
            found["usage"] = [essence(event["usage"])]
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            own = found.setdefault(choice["index"], ["", None])
            own[0] += text
            own[1] = choice.get("finish_reason") or own[1]
    return found


async def ask(http: aiohttp.ClientSession, case: Case) -> tuple[int, Any]:
    """Send a request, and repeat it while the service is full. Return the status and the essence of the answer."""
    while True:
        async with http.post(case.path, json=case.body) as response:
            if response.status == 429:
                assert response.headers["Retry-After"]
                await response.read()
                await asyncio.sleep(0.05)
                continue
            if not case.streamed or response.status != 200:
                return response.status, essence(await response.json())
            return response.status, joined([event async for event in _events(response.content)])


async def _events(lines: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


async def leave(http: aiohttp.ClientSession, case: Case, draw: random.Random) -> None:
    """Send a request, and close the connection at a random moment: before, at or after the first output."""
    after_s, events = draw.expovariate(1 / 0.15), draw.randrange(8)

    async def stay() -> None:
        async with http.post(case.path, json=case.body) as response:
            async for _ in response.content:
                nonlocal events
                events -= 1
                if events < 0 and case.streamed:
                    return  # this closes the connection while some data is unread

    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(after_s if not case.streamed or draw.random() < 0.5 else 30):
            await stay()


async def leave_uploading(url: str, case: Case, draw: random.Random) -> None:
    """Close the connection after sending a part of the body."""
    data = json.dumps(case.body).encode()
    async with _connected(url) as (_, writer):
        writer.write(_head(case, f"Content-Length: {len(data)}") + data[: draw.randrange(len(data))])
        with contextlib.suppress(OSError):
            await writer.drain()


async def oversized(url: str, draw: random.Random) -> int:
    """Send a body above the limit, with or without Content-Length, and return the status.

    The status is read immediately, even if the body has not been sent completely. If the service is full, it refuses a
    body without Content-Length as it refuses any other request. In this case, send the request again.
    """
    announced = draw.random() < 0.5
    while True:
        status = await _oversized(url, announced)
        if announced or status != 429:
            return status
        await asyncio.sleep(0.05)


async def _oversized(url: str, announced: bool) -> int:
    case = Case("oversized", "/infer", {})
    head = f"Content-Length: {MAX_REQUEST_BYTES * 50}" if announced else "Transfer-Encoding: chunked"
    async with _connected(url) as (reader, writer):
        writer.write(_head(case, head))

        async def send() -> None:
            with contextlib.suppress(OSError):
                for _ in range(5):
                    writer.write(bytes(1 << 19) if announced else b"80000\r\n" + bytes(1 << 19) + b"\r\n")
                    await writer.drain()

        sending = asyncio.create_task(send())
        try:
            return int((await reader.readline()).split()[1])
        finally:
            sending.cancel()


async def read_slowly(url: str, case: Case, draw: random.Random) -> tuple[int, Any]:
    """Send a request like `ask`, but read the answer late, slowly and through a small TCP window."""
    data = json.dumps(case.body).encode()
    while True:
        async with _connected(url, receive_bytes=RECEIVE_BYTES) as (reader, writer):
            writer.write(_head(case, f"Content-Length: {len(data)}", "Connection: close") + data)
            await writer.drain()
            await asyncio.sleep(draw.uniform(0.1, 1.5))
            found = bytearray()
            while piece := await reader.read(4096):
                found += piece
                await asyncio.sleep(0.001)
        head, _, body = bytes(found).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 429:
            await asyncio.sleep(0.05)
            continue
        lines = _unchunked(body).splitlines() if b"chunked" in head.lower() else body.splitlines()
        if not case.streamed or status != 200:
            return status, essence(json.loads(b"".join(lines)))
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return status, joined(events)


def _unchunked(body: bytes) -> bytes:
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole += body[:length]
        body = body[length + 2 :]
    return bytes(whole)


def _head(case: Case, *headers: str) -> bytes:
    lines = [f"POST {case.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def _connected(
    url: str, *, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    client = socket.socket()
    client.setblocking(False)
    if receive_bytes is not None:  # must be set before connecting, because the size determines the TCP window
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(client, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=receive_bytes or 2**16)
    except BaseException:
        client.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
