"""`mindie-mm render --workers`: the process that starts the workers of a port, and holds what they share.

The workers inherit the listening sockets. A connection that waits to be accepted therefore survives the death of a
worker, and another worker accepts it. The process itself serves no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from itertools import count

import msgspec
import uvloop

from mindie_mm import logs
from mindie_mm.errors import InputError, MindieMMError
from mindie_mm.processes.ipc import Child
from mindie_mm.processes.restarts import logged
from mindie_mm.processes.standard_streams import has_terminal
from mindie_mm.processes.supervised import Supervised
from mindie_mm.processes.tasks import gather
from mindie_mm.settings.config import ServiceConfig, WorkerConfig
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm import collect
from service.app import require_places
from service.http.access import require_key
from service.render.plans import PlanCache, Report
from service.server import bound, print_in_thread, raise_descriptor_limit
from service.workers.messages import Ask, Begun, Find, Found, FromWorker, Keep, Reported, Reports, Setup, ToWorker

_log = logging.getLogger(__name__)
_MODULE = "service.workers.render_worker_process"
_REPORT_S = 5.0
"""Maximum time in seconds to wait for the report of a worker. Others are left out of an answer."""
_END_S = 10.0
"""Time in seconds that a worker may take to end after its grace time."""


class RenderWorker(Supervised):
    """One worker of a port and its client. If it dies, its connections end, and a new process is started."""

    silence_s = 60.0  # its event loop answers `Ask`

    def __init__(self, setup: Setup, descriptors: Sequence[int], port: Port) -> None:
        """Prepare a worker. `descriptors` are the listening sockets."""
        super().__init__(f"render worker {setup.name}")
        self.name = setup.name
        self._setup = setup
        self._descriptors = descriptors
        self._port = port
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromWorker](FromWorker)
        self._stopping = False
        self._ended = asyncio.Event()
        """Set if the process has ended after `stop`."""
        self.line = ""
        """Line that the worker prints when it is the only one of a port."""

    async def report(self) -> Report | None:
        """Return the state of the worker, or None if it does not answer in time."""
        if not self.accepts:
            return None
        number = next(self._numbers)
        reply = self._expect(number)
        self._send(Ask(number))
        with contextlib.suppress(MindieMMError, TimeoutError):
            async with asyncio.timeout(_REPORT_S):
                report: Report = await asyncio.shield(reply)
                return report
        return None

    async def stop(self) -> None:
        """Let the worker finish its requests, and wait until it has ended."""
        self._stopping = self._replacing = True
        if self.child is not None and self.child.status is None:
            self.child.terminate()
        if self.up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._setup.service.grace_s + _END_S):
                    await self._ended.wait()
        await self.close()

    def hurry(self) -> None:
        """End the grace time."""
        if self.child is not None and self.child.status is None:
            self.child.terminate()

    async def _spawn(self) -> Child:
        with logged("the shared memory of dead processes cannot be reclaimed"):
            await asyncio.to_thread(collect, [self._setup.service.spool or default_spool()])
        child = await Child.start(_MODULE, *map(str, self._descriptors), descriptors=self._descriptors)
        child.channel.send(self._setup.encode())
        return child

    async def _prepare(self, child: Child) -> None:
        self.line = (await child.ready(Begun, f"the {self.noun}")).line

    async def _restart(self) -> None:
        if self._stopping:
            self._ended.set()
            await asyncio.Event().wait()  # until `close` cancels this task
        await super()._restart()

    def _take(self, message: bytes) -> None:
        received = self._decoder.decode(message)
        self._starter.proved()
        if isinstance(received, Find):
            self._send(Found(received.number, self._port.plans.find(received.keys)))
        elif isinstance(received, Keep):
            self._port.plans.keep(received.entries)
        elif isinstance(received, Reported):
            reply = self._replies.pop(received.number)
            if not reply.done():
                reply.set_result(received.report)
        else:
            task = asyncio.create_task(self._send_reports(received.number, self.child))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_reports(self, number: int, child: Child | None) -> None:
        others = [one for one in self._port.workers if one is not self]
        reports = await asyncio.gather(*(one.report() for one in others))
        found = {one.name: report for one, report in zip(others, reports, strict=True) if report is not None}
        if self.child is child:  # a successor numbers its own questions in the same way
            self._send(Reports(number, found))

    def _send(self, message: ToWorker) -> None:
        assert self.child is not None
        self.child.channel.send(self._encoder.encode(message))


class Port:
    """The workers of one port, and the plans of media that they share."""

    def __init__(self, worker: WorkerConfig, config: ServiceConfig, descriptors: Sequence[int]) -> None:
        self.plans = PlanCache(config)
        setups = [Setup(str(index), worker, config) for index in range(config.workers)]
        self.workers = [RenderWorker(setup, descriptors, self) for setup in setups]


def serve_workers(worker: WorkerConfig, config: ServiceConfig) -> None:
    """Run `config.workers` workers until a signal. Print one line when all of them are ready.

    Raises:
        InputError: The settings are invalid, or name clients with quotas, which each worker would count for itself.
        MindieMMError: A worker cannot be started.

    """
    require_key(config)
    if config.api_key_file is not None:
        raise InputError(
            "api_key_file is set, but with several workers each would count the quotas of its keys for itself; use "
            "api_key, or one worker"
        )
    logs.adopt()
    raise_descriptor_limit()
    uvloop.run(_serve(worker, config))


async def _serve(worker: WorkerConfig, config: ServiceConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with bound(config) as listeners:
        require_places(config)
        port = Port(worker, config, [listener.fileno() for listener in listeners])

        def ask_to_stop() -> None:
            if stop.is_set():
                for one in port.workers:
                    one.hurry()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if has_terminal() else [])):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, ask_to_stop)
        if not has_terminal():
            loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP is ignored, because render has no weights")
        try:
            starting = asyncio.create_task(gather([one.open() for one in port.workers]))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            else:
                starting.result()
                first, *more = port.workers[0].line.split("\n")
                print_in_thread("\n".join([f"{first} with {config.workers} workers", *more]))
                await stopped
        finally:
            await asyncio.gather(*(one.stop() for one in port.workers), return_exceptions=True)
    _log.info("stopped")
