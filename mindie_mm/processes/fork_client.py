"""The parent's side of the fork server, which forks the parent's workers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import msgspec

from mindie_mm.errors import MindieMMError, ProcessDied
from mindie_mm.processes import faults
from mindie_mm.processes.fork_server import Forked, Ready
from mindie_mm.processes.forking import Fork, ForkedProcess, worker_files
from mindie_mm.processes.ipc import Child, Failure, Process, socket_pair, spawn
from mindie_mm.processes.restarts import Restarts, Starter, logged
from mindie_mm.settings.environment import environment_now, without_blas_threads

_log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 10.0
"""Maximum time in seconds to wait for a reply from the fork server. After that, the fork server is killed. It normally
replies within milliseconds."""

_MODULE = "mindie_mm.processes.fork_server"
_WHAT = "the fork server"


class ForkClient:
    """Client of a fork server. If the fork server dies, it is restarted, and workers are spawned in the meantime.

    It is an asynchronous context manager, inside which workers can be started.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        """Start the fork server, which then imports the modules. This needs no event loop.

        If the process cannot be started, workers are spawned.

        Args:
            module: Module whose `prepare` imports the workers' modules.
            arguments: Arguments of `prepare`.

        """
        self._arguments = (module, *arguments)
        self._begun: tuple[Process, socket.socket] | None = None
        self._child: Child | None = None
        self._ready: Ready | None = None
        """First message of the fork server. None while it cannot fork."""
        self._tried = asyncio.Event()
        """Set when the first fork server is ready or has failed."""
        self._asking = asyncio.Lock()
        self._reply: asyncio.Future[Forked] | None = None
        """Future of the reply to the last request."""
        self._starter = Starter(_WHAT)
        self._keeper: asyncio.Task[None] | None = None
        try:
            self._begun = self._spawn()
        except (OSError, ProcessDied) as error:
            _log.warning("%s cannot be started: %s", _WHAT, error)

    async def __aenter__(self) -> Self:
        """Start to wait for the fork server on the running event loop."""
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the fork server. Workers continue to run."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._ready = None
        self._forget(f"{_WHAT} is closed")
        if self._child is not None:
            await self._child.end()
        self.abandon()

    @property
    def num_alive(self) -> int:
        """Number of fork servers that accept requests, 0 or 1."""
        return int(self._ready is not None)

    @property
    def restarts(self) -> Restarts:
        """How often the fork server was restarted, and how often a restart failed."""
        return Restarts.of([self._starter])

    async def allows(self, *devices: str | None) -> bool:
        """Return whether an engine on all `devices` may be forked. Wait for the first fork server if necessary."""
        await self._tried.wait()
        return self._ready is not None and {*devices} - {None} <= {*self._ready.devices}

    async def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, spare: bool = False
    ) -> Child:
        """Start a worker as `Child.start` does, by a fork if possible.

        Args:
            module: Name of the module.
            arguments: Arguments of its `main`.
            environment: Environment of the worker. None means the environment of this process.
            spare: Whether a forked worker has a spare copy for its first worker (`forking.start_spare`).

        Raises:
            ProcessDied: The worker can be neither forked nor spawned.

        """
        await self._tried.wait()
        if self._ready is not None:
            fork = Fork.of(module, arguments, environment_now() if environment is None else environment, spare=spare)
            forking = asyncio.create_task(self._fork(fork))
            try:
                return await asyncio.shield(forking)
            except (MindieMMError, OSError) as error:
                _log.warning("%s is started without %s: %s", module, _WHAT, error)
            except asyncio.CancelledError:
                with suppress(MindieMMError, OSError):
                    await (await forking).end()
                raise
        return await Child.start(module, *arguments, environment=environment)

    def abandon(self) -> None:
        """Kill a fork server for which no event loop waits. Otherwise, do nothing."""
        if self._begun is not None:
            (process, sock), self._begun = self._begun, None
            sock.close()
            process.kill()
            process.wait()

    def _spawn(self) -> tuple[Process, socket.socket]:
        return spawn(_MODULE, *self._arguments, environment=without_blas_threads())

    async def _keep(self) -> None:
        """Wait for the fork server, receive its replies, and restart it when it dies, until canceled."""
        try:
            if self._begun is None:
                return
            await self._adopt()
        except (MindieMMError, OSError) as error:
            _log.warning("%s did not start, so processes are started without it: %s", _WHAT, error)
            if self._child is None or self._child.status is None or self._child.status >= 0:
                return  # it would fail again
            await self._restart()
        finally:
            self._tried.set()
        while True:
            with logged(f"the connection to {_WHAT} failed"):
                await self._receive()
            assert self._child is not None
            self._ready = None
            await self._child.end()
            self._forget(f"{_WHAT} died with status {self._child.status}")
            _log.warning("%s died with status %s", _WHAT, self._child.status)
            await self._restart()

    async def _restart(self) -> None:
        self._tried.set()  # workers are spawned until the restart succeeds
        await self._starter.again(self._again)

    async def _again(self) -> None:
        self._begun = self._spawn()
        await self._adopt()

    async def _adopt(self) -> None:
        """Wait until the fork server that was started last is ready."""
        assert self._begun is not None
        (process, sock), self._begun = self._begun, None
        self._child = await Child.adopt(process, sock)
        try:
            self._ready = await self._child.ready(Ready, _WHAT)
        except BaseException:
            await self._child.end()
            raise

    async def _receive(self) -> None:
        """Hand the replies of the fork server to `_fork`, until it dies."""
        assert self._child is not None
        while True:
            try:
                reply = msgspec.msgpack.decode(await self._child.channel.recv(), type=Forked | Failure)
            except EOFError:
                return
            self._starter.proved()
            assert self._reply is not None
            if isinstance(reply, Forked):
                self._reply.set_result(reply)
            else:
                self._reply.set_exception(reply.exception())

    def _forget(self, why: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ProcessDied(why))

    async def _fork(self, fork: Fork) -> Child:
        """Fork a worker. The caller must not cancel this call, because it would not learn the worker's process id."""
        async with self._asking:
            if self._ready is None:
                raise ProcessDied(f"{_WHAT} is not running")
            assert self._child is not None
            self._reply = asyncio.get_running_loop().create_future()
            ours, theirs = socket_pair()
            try:
                with theirs, worker_files() as files:
                    self._child.channel.send_with(msgspec.msgpack.encode(fork), (theirs.fileno(), *files))
                hung = asyncio.get_running_loop().call_later(ANSWER_LIMIT_S, self._kill)
                try:
                    forked = await self._reply
                finally:
                    hung.cancel()
            except BaseException:
                ours.close()
                raise
        faults.point("spawned")
        return await Child.adopt(ForkedProcess(forked.pid), ours)

    def _kill(self) -> None:
        _log.error("%s did not answer within %g s and was killed", _WHAT, ANSWER_LIMIT_S)
        assert self._child is not None
        self._child.kill()
