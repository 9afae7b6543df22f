"""A replica of the worker deployment: one whole worker with its service, on one node."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version
from secrets import token_hex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from mindie_mm import logs
from mindie_mm.errors import ProcessDied
from mindie_mm.worker.worker import Worker
from service.app import create_app, require_places
from service.http.errors import error_response
from service.ray.content import Route
from service.ray.plan import LOST, configuration_of, refusal_of
from service.request.state import Service
from service.telemetry.tracing import Tracer


class WorkerReplica:
    """Answers the requests that ingress replicas have received.

    The whole application of the service runs here, so a request is answered in the same way as without Ray. Ray Serve
    closes the replica by calling `__del__`, after the requests in progress have ended.
    """

    async def __init__(self, plan: bytes) -> None:  # type: ignore[misc] # Ray Serve awaits it
        given = configuration_of(plan)
        logs.configure(logs.LogSettings(given.service.log_format, given.service.log_level), "api")
        # The ingress has checked Host and Origin headers, which depend on the address of the front.
        config = replace(given.service, host="0.0.0.0", allow_open=True, cors_origin=())  # noqa: S104 - no socket
        require_places(config)
        async with AsyncExitStack() as opened:
            tracer = None
            if config.otlp_endpoint is not None:
                tracer = Tracer(config.otlp_endpoint, version("mindie_mm"))
                opened.callback(tracer.close)
            self._worker = await opened.enter_async_context(await Worker.start(given.worker))
            self._name = token_hex(4)
            self._app = create_app(self._worker, config, tracer, replica=self._name)
            self._app.add_exception_handler(ProcessDied, _on_lost)
            await opened.enter_async_context(self._app.router.lifespan_context(self._app))
            self._opened = opened.pop_all()
        service = self._app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._queued_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __del__(self) -> None:
        if (opened := getattr(self, "_opened", None)) is not None:
            await opened.aclose()

    async def answer(
        self, scope: Scope, body: bytes, num_tokens: int, route: Route | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Run the application on a request, and yield its ASGI messages in pickled lists.

        If the generator is closed, the application receives a disconnect. A call from an ingress of another version
        gets status 503.

        Args:
            scope: ASGI scope of the request.
            body: The whole body.
            num_tokens: Estimated number of tokens of the prompt.
            route: Only used by the router of the ingress. It is empty here.

        """
        del route
        state: dict[str, Any] = {}
        scope = {**scope, "state": state}
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(given, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start" and LOST in state:
                message[LOST] = True
            messages.put_nowait(message)

        refusal = refusal_of(scope)
        app = self._app if refusal is None else error_response(refusal)
        task = asyncio.create_task(app(scope, receive, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        self._queued_tokens += num_tokens
        batch: list[Message | None] = []
        try:
            while None not in batch:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                yield pickle.dumps([message for message in batch if message is not None])
            await task
        finally:
            self._queued_tokens -= num_tokens
            gone.set()

    async def check_health(self) -> None:
        """Raise an error if requests would not be answered. Ray Serve then replaces this replica."""
        await self._service.check_healthy()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the state that `ContentRouter` uses."""
        return {
            "name": self._name,
            "queued_tokens": self._queued_tokens,
            "up": self._worker.engine.num_alive > 0,
            "kv_cache_tokens": self._worker.engine.info.kv_cache_tokens,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric of the autoscaling policy `QueuedTokens`."""
        return {"queued_tokens": float(self._queued_tokens)}


async def _on_lost(request: Request, error: Exception) -> Response:
    """Answer a request that the worker's processes did not survive, and mark the answer for the ingress."""
    if request.method == "POST":  # another worker may answer a probe
        setattr(request.state, LOST, True)
    return error_response(error)
