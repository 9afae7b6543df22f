"""N tokenizer processes behind one awaitable call."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from mindie_mm.config import WorkerConfig
from mindie_mm.errors import ProcessDied
from mindie_mm.ipc import Child
from mindie_mm.restarts import RESTART_WAIT_S, Restarts, Starter, logged
from mindie_mm.shm import collect, free
from mindie_mm.tasks import gather
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Request, Setup, Tokenized, TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.tokenize.process"


_STARTING = "others are being started"

GIVEN_UP_S = 5.0
"""How long a process may go on working on a request that nobody waits for any more.

Decoding has no time limit of its own, and the others wait behind it. Less would cost more: with the process goes its
arena, and what the engine has not yet attached of it is made anew.
"""


class _NotBegun(Exception):
    """The process died over the request in front of this one, which another process takes then."""


@dataclass(slots=True, eq=False)
class _Process:
    """One tokenizer process, from its readiness to its death."""

    child: Child
    pending: dict[int, asyncio.Future[Prompt]] = field(default_factory=dict)
    """Requests that it has not answered, by id, in the order in which it takes them."""
    ended: bool = False
    """Whether it was killed over a request that was given up, and not died over one."""
    _grace: asyncio.TimerHandle | None = None
    """Runs while the request in work is one that was given up."""

    def given_up(self, request_id: int) -> None:
        """The caller of this request was cancelled. One that is not in work yet has its time when it is."""
        if request_id == next(iter(self.pending), None):
            self._watch()

    def answered(self, request_id: int) -> None:
        """Its reply has come; the next one is in work."""
        del self.pending[request_id]
        self._watch()

    def fail_pending(self) -> None:
        """Fails the one that it died over; a request that kills one process after another costs no other its turn."""
        self._stop_watching()
        why = f"tokenizer process {self.child.pid} died with status {self.child.status}"
        for index, future in enumerate(self.pending.values()):
            if not future.done():
                future.set_exception(_NotBegun(why) if index or self.ended else ProcessDied(why))
        self.pending.clear()

    def _watch(self) -> None:
        """Gives the request in work, if it was given up, its time from now on."""
        self._stop_watching()
        future = next(iter(self.pending.values()), None)
        if future is not None and future.cancelled():
            self._grace = asyncio.get_running_loop().call_later(GIVEN_UP_S, self._end)

    def _stop_watching(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

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
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()
        self.shown_tokens: list[str] = []
        """As `Tokenizer.shown_tokens`; known once a process is ready."""
        self._next_id = 0
        self._some_alive = asyncio.Event()
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
        """The prompt of `request`, from the least busy process; waits for one while none is alive.

        Raises what the tokenizer raised (InputError and below, ArenaFull), and ProcessDied. On cancellation the
        blocks of the abandoned prompt are freed when it arrives; a process that works on it for GIVEN_UP_S more is
        killed, and another takes what waits behind.
        """
        while True:
            while not self._processes and not self._closed:
                await self._wait_for_process()
            if self._closed:
                raise ProcessDied("the tokenizer pool is closed")
            process = min(self._processes, key=lambda process: len(process.pending))
            self._next_id += 1
            request_id = self._next_id
            future: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
            message = self._encoder.encode(Request(request_id, request))
            process.pending[request_id] = future
            process.child.channel.send(message)
            try:
                return await future
            except _NotBegun:
                continue
            except asyncio.CancelledError:
                process.given_up(request_id)
                raise

    async def close(self) -> None:
        """Stops every process; what is pending fails with ProcessDied."""
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        await asyncio.gather(*map(self._bury, [*self._processes, *self._dying]))
        self._some_alive.set()  # those who wait learn that the pool is closed

    async def _wait_for_process(self) -> None:
        try:
            async with asyncio.timeout(RESTART_WAIT_S):
                await self._some_alive.wait()
        except TimeoutError:
            why = f"no tokenizer process could be started within {RESTART_WAIT_S:g} s; {self._why_down}"
            raise ProcessDied(why) from None

    async def _start_process(self) -> _Process:
        collect()  # what earlier processes left may take the room of the new arena
        process = _Process(await Child.start(_MODULE, self._setup))
        self._dying.append(process)  # until it is ready: whoever is cancelled here leaves it to `close`
        try:
            ready = await process.child.ready(Ready, "a tokenizer process")
        except Exception as error:
            self._why_down = f"the last one did not start: {error}"
            await self._bury(process)
            raise
        self._why_down, self.shown_tokens = _STARTING, ready.shown_tokens
        self._dying.remove(process)
        self._processes.append(process)
        self._some_alive.set()
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
        """Ends and reaps a process, and fails what it has not answered. Once more, if it was cancelled in between."""
        if process in self._processes:
            self._processes.remove(process)
            self._dying.append(process)
            if not self._processes:
                self._some_alive.clear()
        try:
            await process.child.end()
            self._dying.remove(process)
        finally:
            process.fail_pending()
        with logged("the arena of a tokenizer process cannot be collected"):
            collect()  # it is still there if the process was killed

    async def _receive(self, process: _Process, starter: Starter) -> None:
        """Hands replies to their callers until the process dies."""
        while True:
            try:
                reply = self._decoder.decode(await process.child.channel.recv())
            except EOFError:
                return
            starter.proved()
            _hand_over(reply, process.pending[reply.id])
            process.answered(reply.id)


def _hand_over(reply: Tokenized | Failed, future: asyncio.Future[Prompt]) -> None:
    if isinstance(reply, Failed):
        if not future.cancelled():
            future.set_exception(reply.error.exception())
    elif future.cancelled():
        with logged("the blocks of a request that was given up cannot be freed"):  # its directory's removal tries again
            for ref in reply.prompt().refs():
                free(ref)
    else:
        future.set_result(reply.prompt())
