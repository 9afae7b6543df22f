"""The client of the tokenizer process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

import msgspec

from mindie_mm.errors import InputError, NoProcess, ProcessDied
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child
from mindie_mm.processes.restarts import RESTART_WAIT_S, Restarts, Starter, logged
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import collect, free
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import (
    Cancel,
    Failed,
    FromProcess,
    Ping,
    Pong,
    Ready,
    Setup,
    Tokenize,
    Tokenized,
    TokenizeRequest,
    ToProcess,
)
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.tokenize.text.chat_traits import ChatTraits

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.tokenize.stage.tokenizer_process"

_CLOSED = "the tokenizer is closed"

HANG_S = 60.0
"""Time in seconds after which a process that has requests but sends nothing is killed, because its event loop hangs."""

_PING_S = 5.0


class AsyncTokenizer(TokenizerStage):
    """A tokenizer process and its client. If the process dies, its requests fail and a new process is started."""

    def __init__(self, model_path: Path, config: WorkerConfig, forks: ForkClient | None = None) -> None:
        """Prepare a tokenizer. Call the class method `start` instead."""
        self._forks = forks
        self._setup = msgspec.json.encode(Setup.of(model_path, config)).decode()
        self._child: Child | None = None
        self._up = False
        """Whether the process accepts requests."""
        self._settled = asyncio.Event()
        """Event that is set if the process accepts requests, or if it is certain that no process ever will."""
        self._replies: dict[int, asyncio.Future[list[Prompt]]] = {}
        """Futures of the prompts of requests in progress, by request number."""
        self._numbers = count()
        self._heard_s = 0.0
        """Time of the last message from the process, by time.monotonic."""
        self._keeper: asyncio.Task[None] | None = None
        self._starter = Starter("the tokenizer process")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromProcess](FromProcess)
        self.shown_tokens: list[str] = []
        """Same as `Prompts.shown_tokens`. Known when the process is ready."""
        self.chat_traits = ChatTraits()
        """Same as `Prompts.chat_traits`. Known when the process is ready."""
        self._why_down = "it is being started"
        self._closed = False

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig, forks: ForkClient | None = None) -> Self:
        """Start the process and wait until it accepts requests. The process reads `model_path` and creates an arena.

        The process is forked by `forks`, or spawned if `forks` is None.

        Raises:
            UnsupportedCheckpoint, SharedMemoryError, ProcessDied: The process cannot start.

        """
        tokenizer = cls(model_path, config, forks)
        await tokenizer._launch()
        tokenizer._keeper = asyncio.create_task(tokenizer._keep())
        return tokenizer

    @property
    def pids(self) -> list[int]:
        """Id of the process in a list, or an empty list if the process does not accept requests."""
        return [self._child.pid] if self._up and self._child is not None else []

    @property
    def restarts(self) -> Restarts:
        return Restarts.of([self._starter])

    def check(self) -> None:
        if not self._up:
            raise ProcessDied(f"no tokenizer process is alive; {self._why_down}")

    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        await self._wait_until_up()
        number = next(self._numbers)
        reply: asyncio.Future[list[Prompt]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._send(Tokenize(number, [*requests]))
        try:
            return await reply
        except asyncio.CancelledError:
            if number in self._replies and self._up:
                self._send(Cancel(number))
            raise

    async def close(self) -> None:
        """End the process. Pending requests fail with ProcessDied."""
        self._closed = True
        self._why_down = _CLOSED
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._reap(_CLOSED)
        self._settled.set()

    async def _wait_until_up(self) -> None:
        try:
            async with asyncio.timeout(self._starter.patience_s()):
                await self._settled.wait()
        except TimeoutError:
            why = f"no tokenizer process could be started within {RESTART_WAIT_S:g} s"
            raise NoProcess(f"{why}; {self._why_down}") from None
        if self._closed:
            raise ProcessDied(_CLOSED)
        if not self._up:
            raise NoProcess(f"no tokenizer process is alive; {self._why_down}")

    async def _launch(self) -> None:
        """Start a process and wait until it accepts requests. Clean up if the process fails."""
        await asyncio.to_thread(collect)  # arenas of dead processes may use memory that the new arena needs
        try:
            if self._forks is None:
                self._child = await Child.start(_MODULE, self._setup)
            else:
                self._child = await self._forks.start(_MODULE, self._setup, spare=True)
            ready = await self._child.ready(Ready, "the tokenizer process")
        except BaseException as error:
            await self._reap(f"the last process did not start: {error}")
            if isinstance(error, InputError):
                self._settled.set()
            raise
        self.shown_tokens = ready.shown_tokens
        self.chat_traits = ready.chat_traits
        self._heard_s = time.monotonic()
        self._up = True
        self._settled.set()

    async def _keep(self) -> None:
        """Watch the process, and start a successor when it ends, until this task is canceled."""
        while True:
            assert self._child is not None
            pid, hung = self._child.pid, ""
            with logged(f"the connection to tokenizer process {pid} failed"):
                hung = await self._serve()
            with logged(f"tokenizer process {pid} cannot be stopped"):
                await self._reap("it died, and another one is being started", hung)
            _log.warning("tokenizer process %d %s", pid, hung or f"died with status {self._child.status}")
            await self._starter.again(self._launch)

    async def _serve(self) -> str:
        """Pass replies to their callers until the process ends or hangs.

        Return a description for the log if the process hangs, and "" if it has ended.
        """
        receiving = asyncio.create_task(self._receive())
        try:
            while not receiving.done():
                await asyncio.wait({receiving}, timeout=_PING_S)
                if not self._replies:
                    self._heard_s = time.monotonic()
                elif time.monotonic() - self._heard_s > HANG_S:
                    return f"did not respond for {HANG_S:g} s and was killed"
                else:
                    self._send(Ping())
            receiving.result()
            return ""
        finally:
            receiving.cancel()

    async def _receive(self) -> None:
        assert self._child is not None
        while True:
            try:
                reply = self._decoder.decode(await self._child.channel.recv())
            except EOFError:
                return
            self._heard_s = time.monotonic()
            self._starter.proved()
            if not isinstance(reply, Pong):
                _hand_over(reply, self._replies.pop(reply.number))

    async def _reap(self, why: str, hung: str = "") -> None:
        """End and reap the process, and fail its requests. If this call is canceled, it may be repeated."""
        self._up = False
        self._settled.clear()
        self._why_down = why
        if self._child is None:
            return
        try:
            if hung:
                self._child.kill()
            await self._child.end()
        finally:
            ended = hung or f"died with status {self._child.status}"
            died = ProcessDied(f"tokenizer process {self._child.pid} {ended}")
            for prompts in self._replies.values():
                if not prompts.done():  # false if the caller was canceled
                    prompts.set_exception(died)
            self._replies.clear()
        with logged("the arena of the tokenizer process cannot be reclaimed"):
            await asyncio.to_thread(collect)  # the arena still exists if the process was killed

    def _send(self, message: ToProcess) -> None:
        assert self._child is not None
        self._child.channel.send(self._encoder.encode(message))


def _hand_over(reply: Tokenized | Failed, prompts: asyncio.Future[list[Prompt]]) -> None:
    if isinstance(reply, Failed):
        if not prompts.done():
            prompts.set_exception(reply.error.exception())
    elif prompts.done():
        with logged("the blocks of an aborted request cannot be freed"):  # removing its directory frees them later
            for prompt in reply.prompts():
                for ref in prompt.refs():
                    free(ref)
    else:
        prompts.set_result(reply.prompts())
