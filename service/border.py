"""What surrounds every request: the cap on its body, its line in the log, its count."""

from __future__ import annotations

import logging
import time
from secrets import token_hex

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import Metrics

_log = logging.getLogger("service.access")


class Border:
    """ASGI middleware; gives every request an id, found in `scope["state"]["request_id"]` and in X-Request-Id."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 499

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, self._capped(scope, receive), sending)
        except Exception:
            status = 500  # answered further out
            raise
        finally:
            route = scope.get("route")
            path = route.path if route is not None else "none"
            self._metrics.http_requests.labels(path, scope["method"], status).inc()
            duration_s = time.perf_counter() - started
            _log.info("%s %s %s %d %.3f s", request_id, scope["method"], path, status, duration_s)

    def _capped(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, which refuses a body longer than the cap: at once where it is announced, else when it comes."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        refused = HTTPException(413, f"the request's body is longer than the limit of {self._max_body_bytes} bytes")
        received = 0

        async def receiving() -> Message:
            nonlocal received
            if announced.isdigit() and int(announced) > self._max_body_bytes:
                raise refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise refused
            return message

        return receiving
