"""A replica of the ingress deployment: limits a request, names its content, and passes it to a worker replica."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mindie_mm import logs
from mindie_mm.errors import (
    MindieMMError,
    NoProcess,
    OperationalError,
    ProcessDied,
    QueueFull,
    RequestAborted,
    RequestTimeout,
)
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from service.app import add_front
from service.http import errors
from service.http.access import OPEN_PATHS, RELOAD, key_digest, require_key
from service.http.clients import Clients
from service.messages.front import error_event, is_messages
from service.ray.content import Route, keeper_of, route_of
from service.ray.plan import LOST, calling, configuration_of
from service.request.admission import Admission
from service.request.admitted import DONE, encoded, last_event
from service.telemetry.metrics import Metrics
from service.telemetry.pages import merged

_log = logging.getLogger(__name__)

_TRIES = 3
_DEATHS = 2
"""Number of replicas that a request may lose. A request that kills its worker must not end all replicas."""
_PROBE_S = 10.0
"""Maximum time in seconds until a worker begins to answer a request without a body. Probes wait for no replica."""
_IN_THREAD_BYTES = 2**15
"""Minimum size in bytes of a body whose content is named in a thread."""
_LIVE = ("/health/live", "/v2/health/live")
_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
)
_REQUEST_ID = b"x-request-id"


@serve.ingress()
class Ingress:
    """Receives requests over HTTP. It needs no accelerator and loads no model."""

    def __init__(self, plan: bytes, worker: Any) -> None:
        given = configuration_of(plan)
        self._config = config = given.service
        require_key(config)
        logs.configure(logs.LogSettings(config.log_format, config.log_level), "ingress")
        self._loras = given.worker.lora_folders.keys()
        self._worker = worker.options(method_name="answer", stream=True)
        model_name = next(iter(config.served_model_name), checkpoint_name(given.worker.model or EMBEDDED))
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        # Requests are admitted by workers. The ingress bounds only the bodies that it holds.
        admission = Admission(2**31, config.request_timeout_s)
        add_front(app, config, Clients(config), admission, Metrics(model_name))
        errors.install(app)
        app.mount("", self._forward)
        self._app = app

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a bound method for ASGI 2
            await self._app(scope, receive, _without_request_id(send) if scope["type"] == "http" else send)

        return app

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application."""
        if scope["path"] in _LIVE:
            await Response()(scope, receive, send)
            return
        if scope["path"] == RELOAD:
            raise HTTPException(
                501,
                f"{RELOAD} would reload one worker of the cluster; to replace all workers, change the application's "
                "args and deploy it again",
            )
        # Paths that require no key need no body, so a client without a key cannot make the ingress hold one.
        if (body := b"" if scope["path"] in OPEN_PATHS else await _whole(receive)) is None:
            return
        owner = key_digest(Headers(scope=scope))
        named = partial(route_of, body, owner, self._loras)
        route = named() if len(body) < _IN_THREAD_BYTES else await asyncio.to_thread(named)
        route.keeper = keeper_of(scope["path"], body)
        sending = _Sending(send, self._config.send_timeout_s)
        passed = calling({name: scope[name] for name in _SCOPE if name in scope})
        try:
            if scope["path"] == "/metrics" and scope["method"] == "GET":
                page = await self._metrics(passed)
                await Response(page, media_type=CONTENT_TYPE_LATEST)(scope, receive, sending.send)
            else:
                await self._answer(passed, body, route, sending)
        except MindieMMError as error:
            if not sending.begun:
                await errors.error_response(error)(scope, receive, send)
                return
            _log.warning("the response was aborted: %s: %s", type(error).__name__, error)
            scope.setdefault("state", {})["error"] = type(error).__name__
            if isinstance(error, RequestAborted) or not sending.streams_events:
                return  # the server closes the connection of an unfinished response
            await sending.send(
                {"type": "http.response.body", "body": _last_words(scope["path"], error), "more_body": False}
            )
        finally:
            route.end()

    async def _answer(self, scope: Scope, body: bytes, route: Route, sending: _Sending) -> None:
        """Pass a request to one worker after another, until one of them answers it.

        A worker that refuses the request with status 429 or 503 has produced no output, so another one is asked. A
        request that a worker's processes did not survive has been tried twice there, and is not passed on.

        Raises:
            QueueFull: All replicas are full.
            RequestAborted: The client does not read its answer.
            OperationalError: The worker failed.
            RequestTimeout: No replica began to answer in time.
            NoProcess: There is no replica, or the replicas that received the request died without an answer.
            ProcessDied: The worker died after it had begun to answer.

        """
        probe = scope["method"] == "GET"
        wait_s = _PROBE_S if probe else self._config.request_timeout_s
        died: Exception | None = None
        deaths = 0
        try:
            async with asyncio.timeout(wait_s) as limit:
                for left in reversed(range(_TRIES)):
                    try:
                        async with aclosing(self._messages(scope, body, route)) as messages:
                            async for message in messages:
                                if left and route.has_others and _refuses(message):
                                    break
                                limit.reschedule(None)  # the worker limits the time of an answer
                                await sending.send(message)
                            else:
                                return
                    except (RayActorError, RayServeException, TaskCancelledError) as error:
                        if isinstance(error, BackPressureError):
                            raise QueueFull("every worker replica is full, and too many requests wait") from error
                        if sending.begun:
                            raise ProcessDied("the worker replica died before the answer was complete") from error
                        _log.warning("a worker replica failed with a request: %s", type(error).__name__)
                        died, deaths = error, deaths + 1
                        if deaths == _DEATHS:
                            break
                    except RayTaskError as error:
                        _log.exception("the worker replica failed with an unexpected error")
                        raise OperationalError("internal error") from error
        except TimeoutError as error:
            text = f"no worker replica began to answer within {wait_s:g} s"
            raise (NoProcess(text) if probe else RequestTimeout(text)) from error
        raise NoProcess("the worker replicas that received this request died") from died

    async def _metrics(self, scope: Scope) -> str:
        """Return the metrics of all worker replicas that answer. Raise the errors of `_answer` if none does."""
        first = Route()
        pages: dict[str, str] = {}

        async def ask(route: Route) -> None:
            parts: list[bytes] = []

            async def collect(message: Message) -> None:
                if message.get("status", 200) != 200:
                    raise NoProcess(f"a worker answered a request for its metrics with status {message['status']}")
                parts.append(message.get("body", b""))

            await self._answer(scope, b"", route, _Sending(collect, _PROBE_S))
            pages[route.tried[-1]] = b"".join(parts).decode()

        await ask(first)
        others = [ask(Route(only=name)) for name in first.names if name not in pages]
        await asyncio.gather(*others, return_exceptions=True)
        return merged(pages, "replica")

    async def _messages(self, scope: Scope, body: bytes, route: Route) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the answer from a worker."""
        responses = self._worker.remote(scope, body, num_tokens=route.num_tokens, route=route)
        complete = False
        try:
            async for batch in responses:
                for message in pickle.loads(batch):  # noqa: S301 - from our own worker
                    yield message
            complete = True
        finally:
            if not complete:
                responses.cancel()


def _last_words(path: str, error: MindieMMError) -> bytes:
    """Return the events that end a stream of the route `path` after `error`."""
    body = errors.error_object(error)
    if path.endswith("/responses"):
        event = {"type": "error", "code": "server_error", "message": body["error"]["message"], "param": None}
        return encoded({**event, "sequence_number": 2**31 - 1}, named=True)  # the worker counted the events before
    if is_messages(path):
        return encoded(error_event(body, errors.status_of(error)), named=True)
    return encoded(body) + last_event(DONE if "/v1/" in path else None)


class _Sending:
    """Sends the ASGI messages of a worker to the client."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.begun = False
        """True if the client has received a part of the answer."""
        self.streams_events = False
        """True if the answer is a stream of server-sent events."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = [(name, value) for name, value in message["headers"] if name != _REQUEST_ID]
            self.streams_events = any(value.startswith(b"text/event-stream") for _, value in headers)
            message = {**message, "headers": headers}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise RequestAborted(f"the client has not read its answer for {self._timeout_s:g} s") from error


def _refuses(message: Message) -> bool:
    return message["type"] == "http.response.start" and message["status"] in (429, 503) and LOST not in message


async def _whole(receive: Receive) -> bytes | None:
    """Return the body, or None if the client is gone. The middleware limits the body while it arrives."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


def _without_request_id(send: Send) -> Send:
    """Return `send` without the header X-Request-Id, because Ray Serve adds this header to every response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [pair for pair in message["headers"] if pair[0].lower() != _REQUEST_ID]}
        await send(message)

    return sending
