"""N tokenizer processes behind one awaitable call."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from mindie_mm.config import WorkerConfig
from mindie_mm.errors import InputError, NoProcess, ProcessDied
from mindie_mm.ipc import Child
from mindie_mm.restarts import RESTART_WAIT_S, Restarts, Starter, logged
from mindie_mm.shm import collect, free
from mindie_mm.tasks import gather
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Setup, Tokenized, TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.tokenize.process"

_STARTING = "others are being started"
_CLOSED = "the tokenizer pool is closed"

GIVEN_UP_S = 5.0
"""Maximum time in seconds that a process may continue to work on a cancelled request before it is killed.

A process checks for cancellation at each packet of a video or a sound, but not within a picture. Killing it also loses
its arena, and requests whose blocks the engine has not attached yet are tokenized again.
"""


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits for a process or is in progress."""

    message: bytes
    prompt: asyncio.Future[Prompt]


@dataclass(slots=True, eq=False)
class _Process:
    """One ready tokenizer process. It handles one request at a time."""

    child: Child
    job: _Job | None = None
    """Request in progress."""
    ended: bool = False
    """Whether the pool has killed the process because of a cancelled request."""
    _grace: asyncio.TimerHandle | None = None
    """Timer that runs while the request in progress is cancelled."""

    def given_up(self) -> None:
        """Record that the caller of the request in progress was cancelled."""
        self.child.cancel()
        self._grace = asyncio.get_running_loop().call_later(GIVEN_UP_S, self._end)

    def finish(self) -> asyncio.Future[Prompt] | None:
        """End the request in progress. Return the future that its caller awaits, or None if there is no request."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        job, self.job = self.job, None
        return job.prompt if job is not None else None

    def _end(self) -> None:
        why = f"it has worked for {GIVEN_UP_S:g} s on a request that was given up"
        _log.warning("tokenizer process %d is killed: %s", self.child.pid, why)
        self.ended = True
        self.child.kill()


class TokenizerPool:
    """Tokenizer processes, each with its own arena. If one dies, its request fails and the process is restarted."""

    def __init__(self, model_path: Path, config: WorkerConfig) -> None:
        self._setup = msgspec.json.encode(Setup.of(model_path, config)).decode()
        self._processes: list[_Process] = []
        """Processes that accept requests."""
        self._dying: list[_Process] = []
        """Processes that start or end, and accept no requests."""
        self._keepers: list[asyncio.Task[None]] = []
        self._starters: list[Starter] = []
        self._waiting: deque[_Job] = deque()
        """Requests that wait for a process, in order of arrival."""
        self._patience: asyncio.TimerHandle | None = None
        """Timer that runs while requests wait and no process accepts requests."""
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()
        self.shown_tokens: list[str] = []
        """As `Tokenizer.shown_tokens`. Known when a process is ready."""
        self._why_down = _STARTING
        self._closed = False

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Start `config.num_tokenizers` processes that read `model_path`, each with an arena.

        Raises the error of the first process that fails: UnsupportedCheckpoint, SharedMemoryError or ProcessDied.
        """
        pool = cls(model_path, config)
        try:
            processes = await gather([pool._start_process() for _ in range(config.num_tokenizers)])
        except BaseException:
            await pool.close()
            raise
        for process in processes:
            pool._starters.append(starter := Starter("a tokenizer process"))
            pool._keepers.append(asyncio.create_task(pool._keep(process, starter)))
        return pool

    @property
    def pids(self) -> list[int]:
        """Process ids of the live processes."""
        return [process.child.pid for process in self._processes]

    @property
    def restarts(self) -> Restarts:
        """Counts of restarts and of failed attempts."""
        return Restarts.of(self._starters)

    def check(self) -> None:
        """Raise ProcessDied if no process accepts requests."""
        if not self._processes:
            raise ProcessDied(f"no tokenizer process is alive; {self._why_down}")

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """Tokenize `request` with the first free process. Wait for a process if none is alive.

        A cancelled request is dropped if no process has begun it. Otherwise its process is told to cancel it, and is
        killed if it works on the request for GIVEN_UP_S more. If a prompt still arrives, its blocks are freed.

        Raises:
            InputError: The request is wrong.
            ArenaFull: The arena has no room for the request's media.
            ProcessDied: The process died, no process came up in time, or the pool is closed.

        """
        if self._closed:
            raise ProcessDied(_CLOSED)
        job = _Job(self._encoder.encode(request), asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._hand_out()
        try:
            return await job.prompt
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
            for process in self._processes:
                if process.job is job:
                    process.given_up()
            raise

    async def close(self) -> None:
        """Stop all processes. Pending requests fail with ProcessDied."""
        self._closed = True
        self._fail_waiting(_CLOSED)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        await asyncio.gather(*map(self._bury, [*self._processes, *self._dying]))

    def _hand_out(self) -> None:
        """Pass waiting requests to free processes. If no process is alive, set a timer by `Starter.patience_s`."""
        for process in self._processes:
            if self._waiting and process.job is None and not process.ended:
                process.job = self._waiting.popleft()
                process.child.channel.send(process.job.message)
        if self._patience is not None and (self._processes or not self._waiting):
            self._patience.cancel()
            self._patience = None
        elif self._patience is None and self._waiting and not self._processes:
            wait_s = max((starter.patience_s() for starter in self._starters), default=RESTART_WAIT_S)
            self._patience = asyncio.get_running_loop().call_later(wait_s, self._lose_patience)

    def _lose_patience(self) -> None:
        self._fail_waiting(f"no tokenizer process could be started within {RESTART_WAIT_S:g} s; {self._why_down}")

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            _fail(self._waiting.popleft().prompt, NoProcess(why))
        self._hand_out()

    async def _start_process(self) -> _Process:
        await asyncio.to_thread(collect)  # arenas of dead processes may take the new arena's space
        process: _Process | None = None
        try:
            process = _Process(await Child.start(_MODULE, self._setup))
            self._dying.append(process)  # until it is ready, so that `close` ends it if this is cancelled
            ready = await process.child.ready(Ready, "a tokenizer process")
        except Exception as error:
            self._why_down = f"the last one did not start: {error}"
            if process is not None:
                await self._bury(process)
            if isinstance(error, InputError) and not self._processes:
                self._fail_waiting(f"no tokenizer process is alive; {self._why_down}")
            raise
        self._why_down, self.shown_tokens = _STARTING, ready.shown_tokens
        self._dying.remove(process)
        self._processes.append(process)
        self._hand_out()
        return process

    async def _keep(self, process: _Process, starter: Starter) -> None:
        """Serve `process` and its successors until cancelled."""
        while True:
            with logged(f"tokenizer process {process.child.pid} cannot be served"):
                await self._receive(process, starter)
            with logged(f"tokenizer process {process.child.pid} cannot be ended"):
                await self._bury(process)
            if process.ended:
                starter.proved()  # the request was the cause, so the next process starts without a pause
            _log.warning("tokenizer process %d died with status %s", process.child.pid, process.child.status)
            process = await starter.again(self._start_process)

    async def _bury(self, process: _Process) -> None:
        """End and reap a process, and fail its request. May be called again if it was cancelled."""
        if process in self._processes:
            self._processes.remove(process)
            self._dying.append(process)
            self._hand_out()
        try:
            await process.child.end()
        finally:
            if (prompt := process.finish()) is not None:
                died = ProcessDied(f"tokenizer process {process.child.pid} died with status {process.child.status}")
                _fail(prompt, died)
        with logged("the arena of a tokenizer process cannot be collected"):
            await asyncio.to_thread(collect)  # it is still there if the process was killed
        self._dying.remove(process)

    async def _receive(self, process: _Process, starter: Starter) -> None:
        """Pass replies to their callers until the process dies."""
        while True:
            try:
                reply = self._decoder.decode(await process.child.channel.recv())
            except EOFError:
                return
            starter.proved()
            prompt = process.finish()
            assert prompt is not None, "a process answers what it was asked"
            self._hand_out()
            _hand_over(reply, prompt)


def _fail(prompt: asyncio.Future[Prompt], error: ProcessDied) -> None:
    if not prompt.done():  # its caller was cancelled
        prompt.set_exception(error)


def _hand_over(reply: Tokenized | Failed, prompt: asyncio.Future[Prompt]) -> None:
    if isinstance(reply, Failed):
        if not prompt.cancelled():
            prompt.set_exception(reply.error.exception())
    elif prompt.cancelled():
        with logged("the blocks of a request that was given up cannot be freed"):  # its directory's removal tries again
            for ref in reply.prompt().refs():
                free(ref)
    else:
        prompt.set_result(reply.prompt())
