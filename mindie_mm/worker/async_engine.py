"""The client of the engine process. Each request is an async iterator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.requests.engine_messages import (
    Abort,
    Add,
    Encode,
    Features,
    Mount,
    Progress,
    Ready,
    Refill,
    Replica,
    Start,
    Stats,
    Stepped,
    ToEngine,
    Unmount,
)
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import EngineReloaded, InputError, NoProcess, ProcessDied
from mindie_mm.processes import faults
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child, Failure
from mindie_mm.processes.restarts import RESTART_WAIT_S, Restarts, Starter, logged
from mindie_mm.settings.config import EngineConfig
from mindie_mm.settings.paths import absolute

_log = logging.getLogger(__name__)

_PROCESS = "mindie_mm.engine.process.engine_process"
_LAUNCHER = "mindie_mm.engine.process.launcher"


class AsyncEngine:
    """An engine process and its client. If the process dies, its requests fail and a new process is started."""

    def __init__(self, start: Start, forks: ForkClient | None = None) -> None:
        """Create the client without a process. Call the class method `start` instead of this constructor."""
        self._start = start
        self._forks = forks
        self._child: Child
        self._requests: dict[str, asyncio.Queue[Progress]] = {}
        """Queues of unread progress, by the id of each request that the engine has not finished."""
        self._parked: set[str] = set()
        """Ids of requests that wait for `refill`, and not for the engine."""
        self._mounts: dict[int, Mount] = {}
        self._decoder = msgspec.msgpack.Decoder(Stepped)
        self._keeper: asyncio.Task[None] | None = None
        self._starter = Starter("the engine process")
        self._up = False
        """Whether the process runs and is ready."""
        self._settled = asyncio.Event()
        """Set if the engine accepts requests, or if it never will."""
        self._idle = asyncio.Event()
        """Set if there are no requests."""
        self._idle.set()
        self._leaving = asyncio.Event()
        """Set if the process is to be replaced."""
        self._successor: asyncio.Future[None] | None = None
        """Future of the next process during `reload`. In this time, the engine does not accept requests."""
        self.doubts_checkpoint = False
        """Whether the checkpoint may be the reason why the engine does not start, because the last process refused the
        checkpoint, or was started by a reload."""
        self._closed = False
        self._why_down = "is not started"
        self._num_steps = 0
        self.info: Ready
        self.stats = Stats()

    @classmethod
    async def start(
        cls,
        model: Path | None,
        config: EngineConfig,
        family: str | None = None,
        end_token_ids: tuple[int, ...] | None = None,
        generation_config: str = "vllm",
        loading: Callable[[float], object] | None = None,
        replica: Replica = Replica(),  # noqa: B008 - frozen
        forks: ForkClient | None = None,
    ) -> Self:
        """Start the process and wait until it accepts requests.

        Args:
            model: Checkpoint directory, or None for the embedded checkpoint.
            config: Settings of the engine.
            family: See `WorkerConfig.family`.
            end_token_ids: Same as the argument of `load_model`.
            generation_config: See `WorkerConfig.generation_config`.
            loading: Function to call with the loaded share of the weights, from 0 to 1, while they are loaded.
            replica: Place of the engine among the engines of the service.
            forks: Fork server for the process, if its devices allow this. None means that the process is spawned.

        Raises:
            UnsupportedCheckpoint, DeviceError, InputError, ProcessDied: The process cannot start.

        """
        path = None if model is None else str(model)
        engine = cls(Start(path, config, family, end_token_ids, generation_config, replica), forks)
        await engine._launch(loading)
        engine._keeper = asyncio.create_task(engine._keep())
        return engine

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._child.pid

    def place(self, replica: Replica) -> None:
        """Set the place of the engine among the engines of the service, for its next process."""
        self._start = msgspec.structs.replace(self._start, replica=replica)

    @property
    def engines(self) -> list[AsyncEngine]:
        """This engine, in a list like `EngineReplicas.engines`."""
        return [self]

    @property
    def accepts(self) -> bool:
        """Whether the engine accepts requests."""
        return self._alive and self._successor is None

    @property
    def restarting(self) -> bool:
        """Whether a new process is being started, and no earlier attempt has failed."""
        return not (self.accepts or self._closed or self._starter.failing.is_set())

    @property
    def num_alive(self) -> int:
        """Number of engine processes that accept requests, 0 or 1."""
        return int(self.accepts)

    @property
    def restarts(self) -> Restarts:
        """How often the engine was restarted, and how often a restart failed."""
        return Restarts.of([self._starter])

    def check(self) -> None:
        """Raise ProcessDied with the reason if the engine does not accept requests."""
        if not self.accepts:
            raise ProcessDied(f"the engine {self._why_down}")

    async def generate(
        self, request_id: str, ids: NDArray[np.int64], params: SamplingParams, asked_s: float | None = None
    ) -> AsyncGenerator[Progress, None]:
        """Start a request and yield its progress. Closing the generator aborts the request.

        If the engine is being restarted, the request waits until the engine is up.

        Args:
            request_id: Unique id of the request.
            ids: Prompt ids with handle words, int64 [T].
            params: Sampling settings.
            asked_s: Time of the request, by time.monotonic. None means the time of this call.

        Raises:
            InputError: A sampling setting is invalid.
            ProcessDied: The engine died during the request, or the engine is closed.
            EngineReloaded: The engine was replaced during the request.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The engine refused the request or failed to compute it, for example with StaleReference.

        """
        asked_s = time.monotonic() if asked_s is None else asked_s
        params = params.check(self.info.vocab_size)
        await self.wait_until_up()
        with self._queue(request_id) as queue:
            self._send(Add(request_id, np.ascontiguousarray(ids, np.int64).tobytes(), params, asked_s))
            faults.point("sent")
            while True:
                progress = await queue.get()
                if progress.error is not None:
                    raise progress.error.exception()
                yield progress
                if progress.finish_reason is not None:
                    return

    async def encode(self, request_id: str, ids: NDArray[np.int64]) -> AsyncGenerator[list[Features], None]:
        """Yield the features of a prompt's media, some items at a time.

        Args:
            request_id: Unique id of the request.
            ids: Prompt ids with handle words, int64 [T].

        Raises:
            ProcessDied: The engine died during the request, or the engine is closed.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The engine cannot read or encode the media, for example with StaleReference.

        """
        await self.wait_until_up()
        with self._queue(request_id) as queue:
            num_encoded, finished = 0, False
            while not finished:
                self._send(Encode(request_id, np.ascontiguousarray(ids, np.int64).tobytes(), num_encoded))
                progress = await queue.get()
                if progress.error is not None:
                    raise progress.error.exception()
                num_encoded += len(progress.features)
                finished = progress.finish_reason is not None
                yield progress.features

    @contextmanager
    def _queue(self, request_id: str) -> Iterator[asyncio.Queue[Progress]]:
        """Register a request and its queue of progress. On exit, abort the request unless the engine has ended it."""
        assert request_id not in self._requests, request_id
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        self._requests[request_id] = queue
        self._idle.clear()
        try:
            yield queue
        finally:
            if self._requests.get(request_id) is queue:
                self._forget(request_id)
                self._parked.discard(request_id)
                if self._alive:
                    self._send(Abort(request_id))

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._idle.set()

    def refill(self, request_id: str, ids: NDArray[np.int64]) -> None:
        """Send the engine the media that a request needs again (`Progress.needs_media`).

        `ids` are the prompt ids passed to `generate`, with the handle words of new blocks.
        """
        if request_id in self._parked and self._alive:
            self._parked.remove(request_id)
            self._send(Refill(request_id, np.ascontiguousarray(ids, np.int64).tobytes()))

    def mount(self, path: Path, number: int) -> None:
        """Mount the file of blocks at `path` as arena `number`, which the caller has reserved.

        If the file cannot be mounted, requests that refer to the arena fail.
        """
        self._mounts[number] = Mount(str(absolute(path)), number)
        if self._alive:
            self._send(self._mounts[number])

    def unmount(self, number: int) -> None:
        """Unmount arena `number`. No request may refer to it."""
        del self._mounts[number]
        if self._alive:
            self._send(Unmount(number))

    async def reload(self, grace_s: float) -> None:
        """Replace the process with a new process, which reads the checkpoint again.

        Requests wait for the new process. Running requests may finish within `grace_s` seconds, and then fail with
        EngineReloaded. Calls at the same time share a new process that has not started yet.

        Raises:
            ProcessDied: The engine is closed.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The new process did not start. Further attempts follow.

        """
        while self._successor is not None:  # another call replaces the process
            reads_later = not self._leaving.is_set()
            await asyncio.shield(self._successor)
            if reads_later:
                return
        await self.wait_until_up()
        self._successor = successor = asyncio.get_running_loop().create_future()
        self._settled.clear()
        self._why_down = "is being reloaded"
        idle = asyncio.create_task(self._idle.wait())
        try:
            await asyncio.wait({idle, successor}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            self._starter.proved()  # so that the new process starts without a pause
            self._leaving.set()
            await asyncio.shield(successor)  # another call may wait for it, too
        except asyncio.CancelledError:
            if self._successor is successor:
                self._leaving.set()  # else the engine would never accept requests again
            raise
        finally:
            idle.cancel()

    async def close(self) -> None:
        """End the engine process. Running requests fail with ProcessDied."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._reap("is closed")
        self._end_reload(ProcessDied("the engine is closed"))
        self._settled.set()

    @property
    def _alive(self) -> bool:
        return self._up and not self._closed

    async def wait_until_up(self, wait_s: float = RESTART_WAIT_S) -> None:
        """Wait until the engine accepts requests.

        Raises:
            NoProcess: The engine is not up after `wait_s` seconds, or after a shorter time if restarts have failed
                (`Starter.patience_s`).
            ProcessDied: The engine is closed.

        """
        try:
            async with asyncio.timeout(self._starter.patience_s(wait_s)):
                while not self._settled.is_set():  # a reload may begin before the waiting task runs
                    await self._settled.wait()
        except TimeoutError:
            raise NoProcess(f"the engine {self._why_down}; it was not restarted within {wait_s:g} s") from None
        if self._closed:
            raise ProcessDied("the engine is closed")
        if not self._up:
            raise NoProcess(f"the engine {self._why_down}")

    async def settled(self) -> bool:
        """Wait until the engine accepts requests, or is closed, or a restart has failed. Return whether it accepts."""
        waits = [asyncio.create_task(event.wait()) for event in (self._settled, self._starter.failing)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.accepts

    async def _launch(self, loading: Callable[[float], object] | None = None) -> None:
        """Start a process and wait until it accepts requests. Clean up if the process fails."""
        config = self._start.config
        try:
            self._child = await self._started()
        except ProcessDied as error:
            self._why_down = f"did not start: {error}"
            self._end_reload(error)
            raise
        try:
            self._send(self._start)
            self.info = await self._child.ready(Ready, "its process", loading)
        except BaseException as error:
            await self._reap(f"did not start: {error}")
            if isinstance(error, Exception):
                self._end_reload(error)
            if isinstance(error, InputError):
                self.doubts_checkpoint = True
                self._settled.set()
            raise
        for mount in self._mounts.values():
            self._send(mount)
        # A successor gets a cache of the same size, because other programs may use memory by then.
        self._start = msgspec.structs.replace(
            self._start,
            config=replace(config, kv_cache_bytes=self.info.kv_cache_bytes),
            replica=msgspec.structs.replace(self._start.replica, others_started=True),
            step_bytes=self.info.step_bytes,
        )
        self._up = True
        self.doubts_checkpoint = False
        self._end_reload()
        self._settled.set()

    async def _started(self) -> Child:
        """Start a process, or a launcher of several ranks."""
        config = self._start.config
        if (num_ranks := config.tensor_parallel) > 1:
            first_device = self._start.replica.number * num_ranks
            return await Child.start(_LAUNCHER, str(num_ranks), config.device, str(first_device))
        devices = config.device, config.vision_device, config.projector_device
        if self._forks is not None and await self._forks.allows(*devices):
            return await self._forks.start(_PROCESS)
        return await Child.start(_PROCESS)

    def _end_reload(self, error: Exception | None = None) -> None:
        """End `reload`, if it is running, with the error of the new process if there is one."""
        self._leaving.clear()
        successor, self._successor = self._successor, None
        if successor is None or successor.done():
            return
        if error is None:
            successor.set_result(None)
        else:
            successor.set_exception(error)
            successor.exception()  # nobody may wait for it

    async def _keep(self) -> None:
        """Watch the process, and start a successor when it ends, until this task is canceled."""
        while True:
            hung = ""
            with logged(f"the connection to engine process {self.pid} failed"):
                hung = await self._serve()
            with logged(f"engine process {self.pid} cannot be stopped"):
                await self._reap("process died, and another one is being started", hung)
            reloads = self._leaving.is_set()
            _log.log(
                logging.INFO if reloads else logging.WARNING,
                "engine process %d %s",
                self.pid,
                hung or f"died with status {self._child.status}",
            )
            if reloads:
                self.doubts_checkpoint = True
                with logged("the engine process did not start again"):
                    await self._launch()
                    continue
            await self._starter.again(self._launch)

    async def _serve(self) -> str:
        """Handle messages until the process has ended, hangs or is to be replaced.

        Return "" if the process has ended, or else a description for the log.

        A process hangs if it does not complete a step for `step_timeout_s` seconds while a request waits for the
        process. A request that waits for `refill` does not wait for the process.
        """
        patience_s = self._start.config.step_timeout_s
        dispatching = asyncio.create_task(self._dispatch())
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            while not dispatching.done():
                num_steps, waiting = self._num_steps, {*self._requests} - self._parked
                await asyncio.wait({dispatching, leaving}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return "is being replaced"
                if self._num_steps == num_steps and not waiting.isdisjoint(self._requests) and not dispatching.done():
                    return f"made no step for {patience_s:g} s and was stopped"
            dispatching.result()
            return ""
        finally:
            dispatching.cancel()
            leaving.cancel()

    async def _dispatch(self) -> None:
        """Put each request's progress into the request's queue until the process has ended."""
        while True:
            try:
                stepped = self._decoder.decode(await self._child.channel.recv())
            except EOFError:
                return
            self._num_steps += 1
            self.stats = stepped.stats
            if stepped.progress:
                self._starter.proved()
            for progress in stepped.progress:
                if (queue := self._requests.get(progress.request_id)) is None:
                    continue
                if progress.finish_reason is not None or progress.error is not None:
                    self._forget(progress.request_id)
                if progress.needs_media:
                    self._parked.add(progress.request_id)
                queue.put_nowait(progress)

    async def _reap(self, why: str, hung: str = "") -> None:
        """End and reap the process, and fail its unfinished requests."""
        self._up = False
        self._settled.clear()
        self._why_down = why
        self.stats = Stats()
        try:
            await self._child.end()
        finally:
            ended = hung or f"died with status {self._child.status}"
            kind = EngineReloaded if self._leaving.is_set() else ProcessDied
            death = Failure.of(kind(f"the engine process {self.pid} {ended}"))
            for request_id, queue in self._requests.items():
                queue.put_nowait(Progress(request_id=request_id, error=death))
            self._requests.clear()
            self._parked.clear()
            self._idle.set()

    def _send(self, message: ToEngine | Start) -> None:
        self._child.channel.send(msgspec.msgpack.encode(message))
