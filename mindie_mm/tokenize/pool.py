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
"""How long a process may go on working on a request that nobody waits for any more.

It looks at each packet of a video or a sound; one large picture may take longer, and others wait for the process. Less
would cost more: with the process goes its arena, and what the engine has not yet attached of it is made anew.
"""


@dataclass(slots=True, eq=False)
class _Job:
    """A request, waiting for a process or in work."""

    message: bytes
    prompt: asyncio.Future[Prompt]


@dataclass(slots=True, eq=False)
class _Process:
    """One tokenizer process, from its readiness to its death. It has one request at a time."""

    child: Child
    job: _Job | None = None
    """What it has in work."""
    ended: bool = False
    """Whether it was killed over a request that was given up, and not died over one."""
    _grace: asyncio.TimerHandle | None = None
    """Runs while the request in work is one that was given up."""

    def given_up(self) -> None:
        """The caller of the request in work was cancelled."""
        self.child.cancel()
        self._grace = asyncio.get_running_loop().call_later(GIVEN_UP_S, self._end)

    def finish(self) -> asyncio.Future[Prompt] | None:
        """What the caller of the request in work, if there is one, waits for: it is in work no longer."""
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
    """Tokenizer processes, each with an arena of its own; a dead one fails the request in work and is started again."""

    def __init__(self, model_path: Path, config: WorkerConfig) -> None:
        self._setup = msgspec.json.encode(Setup.of(model_path, config)).decode()
        self._processes: list[_Process] = []
        """Processes that take requests."""
        self._dying: list[_Process] = []
        """Processes that take none yet, or no more, and are not reaped."""
        self._keepers: list[asyncio.Task[None]] = []
        self._starters: list[Starter] = []
        self._waiting: deque[_Job] = deque()
        """Requests that no process has in work, in the order in which they came."""
        self._patience: asyncio.TimerHandle | None = None
        """Runs while they wait and no process takes requests."""
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()
        self.shown_tokens: list[str] = []
        """As `Tokenizer.shown_tokens`; known once a process is ready."""
        self._why_down = _STARTING
        self._closed = False

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Starts `config.num_tokenizers` processes that read `model_path`, each with an arena.

        Raises what the first failing process raised: UnsupportedCheckpoint, SharedMemoryError, ProcessDied.
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
        """How often processes were started in place of dead ones, and tries at it that failed."""
        return Restarts.of(self._starters)

    def check(self) -> None:
        """ProcessDied while no process takes requests."""
        if not self._processes:
            raise ProcessDied(f"no tokenizer process is alive; {self._why_down}")

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The prompt of `request`, from the first process that is free; waits for one while none is alive.

        Raises what the tokenizer raised (InputError and below, ArenaFull), and ProcessDied. On cancellation a request
        that no process has begun is dropped, and a process that has it in work is told. The blocks of one that is whole
        by then are freed when its prompt arrives; a process that works on it for GIVEN_UP_S more is killed.
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
        """Stops every process; what is pending fails with ProcessDied."""
        self._closed = True
        self._fail_waiting(_CLOSED)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        await asyncio.gather(*map(self._bury, [*self._processes, *self._dying]))

    def _hand_out(self) -> None:
        """Give those that wait to processes that are free; where none is alive, they wait for one as Starter says."""
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
        await asyncio.to_thread(collect)  # what earlier processes left may take the room of the new arena
        process: _Process | None = None
        try:
            process = _Process(await Child.start(_MODULE, self._setup))
            self._dying.append(process)  # until it is ready: whoever is cancelled here leaves it to `close`
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
        """Serves `process`, and its successors, until cancelled."""
        while True:
            with logged(f"tokenizer process {process.child.pid} cannot be served"):
                await self._receive(process, starter)
            with logged(f"tokenizer process {process.child.pid} cannot be ended"):
                await self._bury(process)
            if process.ended:
                starter.proved()  # it was the request's doing: no pause before the next one starts
            _log.warning("tokenizer process %d died with status %s", process.child.pid, process.child.status)
            process = await starter.again(self._start_process)

    async def _bury(self, process: _Process) -> None:
        """Ends and reaps a process, and fails what it has in work. Once more, if it was cancelled in between."""
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
        """Hands replies to their callers until the process dies."""
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
