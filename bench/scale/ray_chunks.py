"""An ASGI application that sends chunks at a given rate."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send


async def chunks(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, and send the chunks that the query asks for. A chunk is the time at which it was sent."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    while (await receive()).get("more_body", False):
        pass
    query = parse_qs(scope["query_string"].decode())
    number, interval_s = int(query.get("chunks", ["0"])[0]), float(query.get("interval_s", ["0"])[0])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    started = time.monotonic()
    for index in range(number):
        await asyncio.sleep(max(0.0, started + index * interval_s - time.monotonic()))
        await send({"type": "http.response.body", "body": f"data: {time.monotonic()}\n\n".encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
