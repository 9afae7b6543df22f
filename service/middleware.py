"""ASGI middleware for all requests: limits on bodies, request ids, the access log, metrics and traces."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from secrets import token_hex
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mindie_mm import logs
from mindie_mm.errors import MindieMMError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.settings.sources import MASK
from service.http.clients import Clients
from service.http.errors import error_response, retry_after, status_of
from service.request.admission import Admission
from service.telemetry import tracing
from service.telemetry.metrics import Metrics

_log = logging.getLogger("service.access")

BODY_IDLE_S = 30.0
"""Maximum pause in seconds while a request's body is received. A client that pauses for longer gets status 408."""

_BETWEEN_VALUES = tuple(b",[{")
"""Characters that precede a JSON value. Every value except the first is preceded by at least one of them.

These characters are counted in strings, too, but base64 contains none of them.
"""

_WITHOUT_VERSION = (
    *("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models"),
    *("/files", "/batches", "/audio/"),
)
"""Beginnings of paths that are also accepted without /v1, because some clients omit it."""

_CODINGS = (b"content-encoding", b"transfer-encoding")
_PLAIN = (b"", b"identity", b"chunked")
"""Values of the headers in `_CODINGS` that mean that the body is not compressed."""

_PATH = re.compile(r"[\w./~:-]{1,200}", re.ASCII)
"""Pattern of paths that are logged if no route has them. Other paths may contain a client's text."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Middleware:
    """ASGI middleware that identifies, limits, logs and counts every request.

    - The id of a request is stored in `scope["state"]["request_id"]` and returned in the header X-Request-Id. If the
      client sent an X-Request-Id itself, the client's id is returned instead, and both ids are logged.
    - `scope["state"]["arrived"]` is the time at which the request's head arrived, from `time.perf_counter`.
    - `scope["state"]["client"]` is the `Client` whose API key the request carries, if the service has keys.
    - `scope["state"]["spool_body"]` is a function by which a route says that it writes the body to disk while it reads
      it. Its argument is the maximum size of the body in bytes, in place of the limits on bodies in memory.
    - `scope["state"]["hold_bytes"]` is a function that counts bytes of the disk as part of the body.
    - If an error aborts a response that has started, the responder stores the name of the error's class in
      `scope["state"]["error"]`, for the log. The reason of a refusal is in `scope["state"]["reason"]`.
    - /v1 is added to the paths of OpenAI's and Anthropic's APIs that lack it.
    - The setting `root_path` is removed from the path of a request, unless the proxy has removed it already.
    - HEAD is routed as GET, because load balancers use HEAD for health checks. The server omits the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServiceConfig,
        clients: Clients,
        admission: Admission,
        metrics: Metrics,
        tracer: tracing.Tracer | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._clients = clients
        self.admission = admission
        self._metrics = metrics
        self._tracer = tracer
        self.held_bytes = 0
        """Total size in bytes of the bodies of all requests that are being read or answered, except spooled bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _with_route_path(scope, self._config.root_path)
        method = scope["method"]
        if method == "HEAD":
            scope = {
                **scope,
                "method": "GET",
            }  # a copy, because the server must see HEAD in its own scope to omit the body
        request_id = token_hex(12)
        logs.request_id.set(request_id)
        started = time.perf_counter()
        trace = None
        if self._tracer is not None and method == "POST":  # other methods are probes
            trace = tracing.Trace(request_id, started, _trace_headers(scope))
            tracing.current.set(trace)
        scope.setdefault("state", {}).update(request_id=request_id, arrived=started)
        given = _given_id(scope)
        body = _Body(scope, receive, self, self._config)
        scope["state"].update(spool_body=body.spool, hold_bytes=body.hold)
        status, begun = 499, False

        async def sending(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", (given or request_id).encode())]
            await send(message)

        try:
            await self._app(scope, body.receive, sending)
        except Exception as error:
            if begun or isinstance(error, HTTPException):  # the application itself answers HTTPException
                status = 500
                raise
            _log.exception("the request failed with an unexpected error")
            await error_response(error)(scope, receive, sending)
        finally:
            self.held_bytes -= body.num_held
            route = scope["route"].path if "route" in scope else "none"
            path = None if "route" in scope else self._shown_path(scope["path"])
            self._metrics.count_http(route, method, status)
            _log_access(method, route, path, status, started, given, scope["state"])
            if trace is not None and self._tracer is not None:
                self._tracer.record(trace, self._metrics.model_name, method, route, status)

    def _shown_path(self, path: str) -> str | None:
        """Return a path that no route has, with API keys masked, for the log.

        Return None if the path may contain text.
        """
        for key in filter(None, (*self._clients.keys, self._config.admin_key)):
            path = path.replace(key, MASK)
        return path if _PATH.fullmatch(path.replace(MASK, "")) else None


def _num_values(body: bytes) -> int:
    """Return the number of characters of `_BETWEEN_VALUES` in a piece of a body."""
    # bytes.count takes three times as long, which counts in bodies with media.
    characters = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(characters == one)) for one in _BETWEEN_VALUES)


def _with_route_path(scope: Scope, root: str | None) -> Scope:
    """Return the scope with the path of a route: without the setting `root_path`, and with the version."""
    if root is not None:
        inner = scope["path"].removeprefix(root)
        scope = {**scope, "root_path": root, "path": inner if inner.startswith("/") else scope["path"]}
    if scope["path"].startswith(_WITHOUT_VERSION):
        scope = {**scope, "path": f"/v1{scope['path']}"}
    return scope


def _log_access(
    method: str,
    route: str,
    path: str | None,
    status: int,
    started: float,
    given: str | None,
    state: Mapping[str, Any],
) -> None:
    """Write the request's line to the access log.

    `path` is the path to log if no route has it, and `given` is the request id that the client sent.
    """
    error_name, reason = state.get("error"), state.get("reason")
    duration_s = time.perf_counter() - started
    fields = {"method": method, "route": route, "status": status, "duration_s": round(duration_s, 6)}
    fields |= {"path": path} if path is not None else {}
    fields |= {"client_request_id": given} if given else {}
    fields |= {"client": client.name} if (client := state.get("client")) is not None and client.name else {}
    fields |= {"error": error_name} if error_name else {}
    fields |= {"reason": reason} if reason else {}
    named = (f" as {given}" if given else "") + (f", aborted: {error_name}" if error_name else "")
    named += f": {reason}" if reason else ""
    # Probes, scrapers and the web page poll the service several times a second.
    level = logging.DEBUG if method in ("GET", "HEAD") and status < 400 else logging.INFO
    _log.log(level, "%s %s %d %.3f s%s", method, path or route, status, duration_s, named, extra={"fields": fields})


def _given_id(scope: Scope) -> str | None:
    """Return the request id that the client sent, or None if there is none or if it is unsafe to log."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    return values[0] if values and _REQUEST_ID.fullmatch(values[0]) else None


def _trace_headers(scope: Scope) -> dict[str, str]:
    """Return the request's W3C Trace Context headers."""
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}


class _Body:
    """An incoming body, with limits on its size, on its duration and on the total size of all bodies."""

    def __init__(self, scope: Scope, receive: Receive, middleware: Middleware, config: ServiceConfig) -> None:
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._announced = int(announced) if announced.isdigit() else 0
        self._codings = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CODINGS and value.strip().lower() not in _PLAIN
        }
        self._scope = scope
        self._receive = receive
        self._middleware = middleware
        self._config = config
        self._deadline = asyncio.get_running_loop().time() + config.request_timeout_s
        self._limit = config.max_request_bytes
        self._whole = False
        self._is_json = not any(
            name == b"content-type" and value.lower().startswith(b"multipart/") for name, value in scope["headers"]
        )
        self._is_held = True
        self._num_bytes = 0
        """Number of bytes received so far."""
        self._num_values = 0

    @property
    def num_held(self) -> int:
        """Number of bytes that are held in memory."""
        return self._num_bytes if self._is_held else 0

    def spool(self, max_bytes: int) -> None:
        """Accept up to `max_bytes` bytes, because the route writes the body to disk. Call this before `receive`."""
        self._limit, self._is_held = max_bytes, False

    def hold(self, num_bytes: int) -> None:
        """Count further bytes in memory as part of the body. Raise HTTPException if they exceed a limit."""
        self._num_bytes += num_bytes
        self._middleware.held_bytes += num_bytes
        self._check(self._num_bytes)

    async def receive(self) -> Message:
        """Return the next ASGI message.

        A body whose Content-Length is above the limit is refused before any of the body is read.

        Raises:
            HTTPException: The body is compressed (status 415), is too long or has too many values (413), arrives too
                slowly (408), or exceeds the limit on all bodies together (429). The status is also 429 or 503 if the
                request could not be admitted. 408 and 415 close the connection.

        """
        if self._whole:
            return await self._receive()
        for name, coding in self._codings.items():
            text = (
                f"the request body has {name.title()}: {coding[:40]}, which is not supported; send the body "
                "uncompressed"
            )
            raise HTTPException(415, text, headers={"Accept-Encoding": "identity", "Connection": "close"})
        self._check(self._announced)
        try:
            self._middleware.admission.require_room(self._scope["state"].get("client"))
        except MindieMMError as error:  # FastAPI would report any other exception as an invalid body
            raise HTTPException(status_of(error), str(error), headers=retry_after(error)) from error
        idle_until = asyncio.get_running_loop().time() + BODY_IDLE_S
        try:
            async with asyncio.timeout_at(min(idle_until, self._deadline)):
                message = await self._receive()
        except TimeoutError as error:
            late = f"took longer than the limit of {self._config.request_timeout_s:g} s"
            if idle_until < self._deadline:
                late = f"paused for longer than the limit of {BODY_IDLE_S:g} s"
            raise HTTPException(408, f"the request body {late}", headers={"Connection": "close"}) from error
        self._whole = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        if self._is_held:
            self._middleware.held_bytes += num_bytes
        if self._is_json:
            self._num_values += _num_values(message.get("body", b""))
        if self._num_values > (most := self._config.max_request_values):
            raise HTTPException(413, f"the request body has more JSON values than the limit of {most}")
        self._check(self._num_bytes)
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._limit:
            raise HTTPException(413, f"the request body has at least {num_bytes} bytes; the limit is {self._limit}")
        held = self._middleware.held_bytes - self._num_bytes + num_bytes
        if self._is_held and held > self._config.max_held_bytes:
            raise HTTPException(
                429,
                f"the bodies of all requests in progress would total {held} bytes; the limit is "
                f"{self._config.max_held_bytes}",
                headers={"Retry-After": "1"},
            )
