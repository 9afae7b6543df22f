"""Answers the requests of batches by calling the routes of the service in this process."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from starlette.types import ASGIApp, Message

from service.batches.run import Answer
from service.files.store import EVERYONE

_REQUEST_ID = b"x-request-id"


def calling(app: ASGIApp) -> Answer:
    """Return a function that answers a request with `app`, in the name of the API key that owns the batch."""

    async def answer(endpoint: str, body: bytes, owner: str) -> tuple[int, str, bytes]:
        given = [{"type": "http.request", "body": body, "more_body": False}]
        status, request_id = 500, ""
        parts: list[bytes] = []

        async def receive() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # the request ends if its task is cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message["headers"]).get(_REQUEST_ID, b"").decode()
            else:
                parts.append(message.get("body", b""))

        digest = sha256(b"").digest() if owner == EVERYONE else bytes.fromhex(owner)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": endpoint,
            "raw_path": endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "client": None,
            "server": None,
            "state": {"batch_owner": digest},
        }
        await app(scope, receive, send)
        return status, request_id, b"".join(parts) or b"null"

    return answer
