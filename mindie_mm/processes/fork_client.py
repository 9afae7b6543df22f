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
from mindie_mm.processes.supervised import Supervised
from mindie_mm.settings.environment import environment_now, without_blas_threads

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.processes.fork_server"

_START_LIMIT_S = 60.0
"""Maximum time in seconds to wait until the fork server is ready. After that, workers are spawned. Waiting is
worthwhile, because a spawned worker has to import the same modules."""


class ForkClient(Supervised):
    """Client of a fork server. If the fork server dies, a copy of it takes over.

    The fork server forks the copy as soon as it is ready, because importing its modules again would take seconds. If no
    fork server can be started, workers are spawned.

    It is an asynchronous context manager, inside which workers can be started.
    """

    silence_s = 5.0  # it normally replies within milliseconds

    def __init__(self, module: str, *arguments: str) -> None:
        """Start the fork server, which then imports the modules. This needs no event loop.

        If the process cannot be started, workers are spawned.

        Args:
            module: Module whose `prepare` imports the workers' modules.
            arguments: Arguments of `prepare`.

        """
        super().__init__("fork server")
        self._arguments = (module, *arguments)
        self._begun: tuple[Process, socket.socket] | None = None
        """Fork server that was started without an event loop, and this process's end of its channel."""
        self._devices: set[str] = set()
        """See `Ready.devices`."""
        self._copy: asyncio.Task[Child] | None = None
        """The next fork server, which waits until it is needed."""
        self._asking = asyncio.Lock()
        with suppress(OSError, ProcessDied):  # the next attempt logs the error
            self._begun = self._begin()

    async def __aenter__(self) -> Self:
        """Start to wait for the fork server on the running event loop."""
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the fork server. Workers continue to run."""
        with suppress(MindieMMError, OSError):
            if self._copy is not None:
                await (await self._copy).close()  # first, because nobody else would learn its process id
        await self.close()
        self.abandon()

    async def allows(self, *devices: str | None) -> bool:
        """Return whether an engine on all `devices` may be forked. Wait for the fork server if necessary."""
        return await self.settled(_START_LIMIT_S) and {*devices} - {None} <= self._devices

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
        fork = Fork.of(module, arguments, environment_now() if environment is None else environment, spare=spare)
        for _ in range(2):  # if the fork server dies during the first attempt, its successor forks the worker
            if not await self.settled(_START_LIMIT_S):
                break
            forking = asyncio.create_task(self._fork(fork))
            try:
                return await asyncio.shield(forking)
            except (MindieMMError, OSError) as error:
                _log.warning("%s was not forked: %s", module, error)
            except asyncio.CancelledError:
                with suppress(MindieMMError, OSError):
                    await (await forking).close()
                raise
        return await Child.start(module, *arguments, environment=environment)

    def abandon(self) -> None:
        """Kill a fork server that no event loop waits for. Otherwise, do nothing."""
        if self._begun is not None:
            (process, sock), self._begun = self._begun, None
            sock.close()
            process.kill()
            process.wait()

    def _begin(self) -> tuple[Process, socket.socket]:
        return spawn(_MODULE, *self._arguments, environment=without_blas_threads())

    async def _spawn(self) -> Child:
        copy, self._copy = self._copy, None
        with suppress(MindieMMError, OSError):
            if copy is not None:
                return await copy
        (process, sock), self._begun = self._begun or self._begin(), None
        return await Child.adopt(process, sock)

    async def _prepare(self, child: Child) -> None:
        self._devices = {*(await child.ready(Ready, "it")).devices}

    async def _launch(self) -> None:
        await super()._launch()
        fork = Fork.of(_MODULE, self._arguments, without_blas_threads())
        self._copy = asyncio.create_task(self._fork(fork))

    async def _keep(self) -> None:
        try:
            await self._launch()
        except (MindieMMError, OSError) as error:
            _log.warning("the fork server did not start, so processes are started without it: %s", error)
            if self.child is None or self.child.status is None or self.child.status >= 0:
                self._settled.set()  # it would fail again
                return
            await self._restart()
        await super()._keep()

    def _take(self, message: bytes) -> None:
        self._starter.proved()
        answer = msgspec.msgpack.decode(message, type=Forked | Failure)
        _, reply = self._replies.popitem()
        if isinstance(answer, Forked):
            reply.set_result(answer)
        else:
            reply.set_exception(answer.exception())

    async def _fork(self, fork: Fork) -> Child:
        """Fork a worker. The caller must not cancel this call, because it would not learn the worker's process id."""
        async with self._asking:
            self.check()
            assert self.child is not None
            ours, theirs = socket_pair()
            try:
                with theirs, worker_files() as files:
                    self.child.channel.send_with(msgspec.msgpack.encode(fork), (theirs.fileno(), *files))
                forked: Forked = await self._expect(ours)
            except BaseException:
                ours.close()
                raise
        faults.point("spawned")
        return await Child.adopt(ForkedProcess(forked.pid), ours)
