"""The service process: starts the worker, serves HTTP, and shuts down on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from mindie_mm import logs
from mindie_mm.errors import OperationalError, os_errors_as
from mindie_mm.nn.checkpoint.demo import demo_note
from mindie_mm.processes import faults
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.progress import LoadingText, repeating
from mindie_mm.processes.restarts import logged
from mindie_mm.processes.standard_streams import has_terminal
from mindie_mm.settings.config import GiB, ServiceConfig, WorkerConfig
from mindie_mm.settings.environment import fault_folder
from mindie_mm.worker.worker import Worker
from service.app import create_app, require_places
from service.http.access import OPEN_WARNING, is_open, require_key
from service.http.certificate import Certificate
from service.http.connection import HEAD_TIMEOUT_S, Connection
from service.http.unix_socket import bound_unix_socket
from service.render.plans import Shared
from service.request.state import Service
from service.telemetry.tracing import Tracer

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE_TIMEOUT_S = 2
"""Time in seconds for connections to close after their requests have ended. Slow clients may need this time."""


class Fellows(Shared):
    """What a service shares with the other workers of its port, and the process that started them."""

    @abstractmethod
    def announce(self, line: str) -> None:
        """Report that this worker accepts connections. `line` is what the only service of a port would print."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a service among the workers of one port."""

    listeners: Sequence[socket.socket]
    """Sockets that are bound to the addresses."""
    fellows: Callable[[], AbstractAsyncContextManager[Fellows]]
    """Function that opens what the workers share, inside the event loop."""


def serve(
    worker_config: WorkerConfig,
    config: ServiceConfig,
    forks: ForkClient,
    *,
    only_plans: bool = False,
    place: Place | None = None,
) -> None:
    """Serve until a signal stops the service. Print one line when the service is ready.

    SIGTERM and SIGINT stop the service. SIGHUP stops it if the process has a controlling terminal, because the terminal
    may have been closed. Without a terminal, SIGHUP replaces the engines one by one, as a POST to /admin/reload does.

    When the service stops, new requests are refused, and running requests may finish within the grace time. A second
    signal ends the grace time. If the service cannot start, the error is raised.

    `forks` forks the processes of the worker, and `only_plans` leaves out its engine (`Worker.start`). `place` is None
    for a port with one service.
    """
    require_key(config)
    faults.arm("api", fault_folder())
    logs.adopt()
    raise_descriptor_limit()
    tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint, version("mindie_mm"))
    try:
        with contextlib.suppress(asyncio.CancelledError):  # a signal stopped the service before it was ready
            uvloop.run(_serve(worker_config, config, forks, tracer, only_plans=only_plans, place=place))
    finally:
        if tracer is not None:
            tracer.close()


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because each connection needs a descriptor.

    The usual soft limit of 1,024 protects programs that call `select`. No process of the service calls `select` with
    many descriptors.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid a higher limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(
    worker_config: WorkerConfig,
    config: ServiceConfig,
    forks: ForkClient,
    tracer: Tracer | None,
    *,
    only_plans: bool,
    place: Place | None,
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_error)
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.cancelling():  # a second signal must not interrupt the cleanup
            task.cancel()

    signals = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    reloads = False
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP
        if has_terminal():
            signals.append(signal.SIGHUP)
        else:
            reloads = True
            loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP is ignored while the model is being loaded")
    elif place is None:
        _log.info("SIGHUP is ignored, because the service was started with nohup. To reload, use POST /admin/reload")
    for number in signals:
        loop.add_signal_handler(number, cancel)
    async with AsyncExitStack() as stack:
        listeners = stack.enter_context(bound(config)) if place is None else place.listeners
        fellows = None if place is None else await stack.enter_async_context(place.fellows())
        certificate = Certificate.of(config)
        require_places(config)  # before the model is loaded, which takes minutes
        model, device = worker_config.model or "the embedded checkpoint", worker_config.engine.device
        num = worker_config.num_decoders
        noun = "decoder" if num == 1 else "decoders"
        _log.info("loading %s on device %s with %d %s", model, device, num, noun)
        loading = LoadingText()
        async with forks:
            with repeating(lambda: _log.info("%s", loading)):
                starting = await Worker.start(worker_config, loading=loading, forks=forks, only_plans=only_plans)
            async with starting as worker:
                app = create_app(worker, config, tracer, shared=fellows)
                server = _Server(app, config, certificate, print_in_thread if fellows is None else fellows.announce)
                with _listening_errors(config):
                    for listener in listeners:
                        listener.listen(server.config.backlog)
                for number in signals:
                    loop.add_signal_handler(number, server.ask_to_stop)
                if reloads:
                    loop.add_signal_handler(signal.SIGHUP, server.ask_to_reload)
                faults.point("starting")
                await server.serve(sockets=[*listeners])
        _log.info("stopped")


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error as the loop's own handler does, but without the `repr` of tasks, which may contain client data."""
    _log.error("%s", context["message"], exc_info=context.get("exception"))


@contextlib.contextmanager
def bound(config: ServiceConfig) -> Iterator[list[socket.socket]]:
    """Yield a socket that is bound to the address in `config` but does not listen yet, and another one for --uds.

    With SO_REUSEADDR, several programs can bind to an address while none of them listens. A second service must fail
    before it loads a model. Each service therefore also binds an abstract Unix socket whose name contains the address.
    The kernel gives this name to only one process, and frees it when the process ends.

    Raises:
        OperationalError: The address, or the path of --uds, cannot be bound.

    """
    with contextlib.ExitStack() as stack:
        with _listening_errors(config):
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit this option. Only the kernel can tell a slow client from a client that does not read.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.send_timeout_s * 1000))
            listener.bind(address)
            host, port = listener.getsockname()[:2]
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0mindie_mm {host} {port}")
        yield [listener] if config.uds is None else [listener, stack.enter_context(bound_unix_socket(config.uds))]


def _listening_errors(config: ServiceConfig) -> contextlib.AbstractContextManager[None]:
    return os_errors_as(OperationalError, f"cannot listen on {config.host}:{config.port}")


def print_in_thread(line: str) -> None:
    """Print `line` on standard output in a thread, because the write may block forever."""
    threading.Thread(target=_print, args=(line,), name="ready", daemon=True).start()


def _print(line: str) -> None:
    """Print `line` on standard output. The caller must not wait, because the write may block forever."""
    try:
        os.write(1, f"{line}\n".encode(errors="surrogateescape"))
    except OSError as error:  # the pipe has no reader, or the disk is full
        _log.warning("%s (standard output: %s)", line, error.strerror)


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers. It ends all requests before it waits for connections to close."""

    def __init__(
        self,
        app: FastAPI,
        config: ServiceConfig,
        certificate: Certificate | None = None,
        announce: Callable[[str], None] = print_in_thread,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",  # "auto" would import a websocket library, which no route uses
                log_config=None,
                access_log=False,
                log_level=max(logging.WARNING, logging.root.level),  # this module itself logs starts and stops
                server_header=False,
                lifespan="on",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            )
        )
        self._app = app
        self._settings = config
        self._certificate = certificate
        self._announce = announce
        self._tasks: set[asyncio.Task[None]] = set()

    def ask_to_stop(self) -> None:
        """Start the shutdown as uvicorn does on a signal, but exit with status 0. A second call ends the grace time."""
        if self.should_exit and self.started:
            self._service.admission.end_grace()
        self.should_exit = True

    def ask_to_reload(self) -> None:
        """Start replacing the engines one by one, unless the service is stopping."""
        if not self.started or self.should_exit:
            return
        self._start(self._reload())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        with logged("the engines were not all replaced"):
            await self._service.reload()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because the event loop already handles the signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and print the service's URL, model, device, data type and free memory."""
        assert sockets is not None
        await super().startup([])  # it would encrypt the Unix socket, too
        self.servers = [await self._listen(listener) for listener in sockets]
        clients, certificate = self._service.clients, self._certificate
        self._start(clients.watched.watch(clients.reload))
        if certificate is not None:
            self._start(certificate.watched.watch(certificate.reload))
        if is_open(self._settings):
            # The warning is logged at every log level.
            _log.log(max(logging.WARNING, logging.root.level), "%s", OPEN_WARNING % self._settings.host)
        host, port = sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        worker = self._service.worker
        what = "renders prompts of" if worker.only_plans else "serves"
        line = f"mindie_mm {what} {self._service.model_name} at {scheme}://{host}:{port}"
        if self._settings.uds is not None:
            line += f" and on the socket {self._settings.uds}"
        if not worker.only_plans:
            info = worker.engine.info
            line += f" on {info.device} in {info.dtype}, with {info.free_bytes / GiB:.1f} GiB free"
        if note := demo_note(self._service.worker.config.model):
            line += f"\n{note}"
        self._announce(line)

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections as `uvicorn.Server.startup` does, but encrypt only those of the port."""
        tls: dict[str, Any] = {}
        if self._certificate is not None and listener.family != socket.AF_UNIX:
            tls = {"ssl": self._certificate.context, "ssl_handshake_timeout": HEAD_TIMEOUT_S}

        def connection() -> Connection:
            return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        loop = asyncio.get_running_loop()
        return await loop.create_server(connection, sock=listener, backlog=self.config.backlog, **tls)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let running requests finish within the grace time, end the rest, and close.

        Until it closes, the server still listens, answers requests with the message that it is stopping, and answers
        /health/live. Each answer ends its connection, so that a client with a persistent connection can reach another
        service at the same address.
        """
        state = self.server_state
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        for connection in list(state.connections):
            assert isinstance(connection, Connection)
            connection.drain()
        admission, grace_s = self._service.admission, self._settings.grace_s
        _log.info("stopping; running requests: %d, which have %g s to finish", len(admission), grace_s)
        await admission.stop(grace_s)
        faults.point("stopping")
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    @property
    def _service(self) -> Service:
        service = self._app.state.service
        assert isinstance(service, Service)
        return service
