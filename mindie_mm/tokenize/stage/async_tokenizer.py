"""The client of the tokenizer process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec

from mindie_mm.inputs import Media
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child
from mindie_mm.processes.restarts import logged
from mindie_mm.processes.supervised import Supervised
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import collect, free
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.prompt import PlannedPrompt, Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.setup import Setup
from mindie_mm.tokenize.stage.tokenizer_messages import (
    Cancel,
    Cut,
    CutUp,
    Failed,
    FromProcess,
    Ping,
    Planned,
    Pong,
    Tokenize,
    Tokenized,
    ToProcess,
)
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.tokenize.tokenizer_traits import TokenizerTraits

_MODULE = "mindie_mm.tokenize.stage.tokenizer_process"


class AsyncTokenizer(Supervised, TokenizerStage):
    """A tokenizer process and its client. If the process dies, its requests fail and a new process is started."""

    silence_s = 60.0  # its event loop answers `Ping`

    def __init__(
        self, model_path: Path, config: WorkerConfig, forks: ForkClient | None = None, *, states_sizes: bool = False
    ) -> None:
        """Prepare a tokenizer. Call the class method `start` instead."""
        super().__init__("tokenizer process")
        self._forks = forks
        self._setup = msgspec.json.encode(Setup.of(model_path, config, states_sizes=states_sizes)).decode()
        self._numbers = count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromProcess](FromProcess)
        self.traits = TokenizerTraits()
        """Properties of the checkpoint. Known when the process is ready."""

    @classmethod
    async def start(
        cls, model_path: Path, config: WorkerConfig, forks: ForkClient | None = None, *, states_sizes: bool = False
    ) -> Self:
        """Start the process and wait until it accepts requests. The process reads `model_path` and creates an arena.

        The process is forked by `forks`, or spawned if `forks` is None. With `states_sizes`, `traits` contain sizes.

        Raises:
            UnsupportedCheckpoint, SharedMemoryError, ProcessDied: The process cannot start.

        """
        tokenizer = cls(model_path, config, forks, states_sizes=states_sizes)
        await tokenizer.open()
        return tokenizer

    @property
    def pids(self) -> list[int]:
        """Id of the process in a list, or an empty list if the process does not accept requests."""
        return [self.pid] if self.up else []

    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        prompts: list[Prompt] = await self._answered(lambda number: Tokenize(number, [*requests]))
        return prompts

    async def plan(self, requests: Sequence[TokenizeRequest], *, fill: bool = False) -> list[PlannedPrompt]:
        plans: list[PlannedPrompt] = await self._answered(
            lambda number: Tokenize(number, [*requests], plans=True, fill=fill)
        )
        return plans

    async def cut(
        self, speech: Media, folder: Path, max_bytes: int, domain: tuple[bytes, str], *, always: bool
    ) -> Clips:
        clips: Clips = await self._answered(lambda number: Cut(number, speech, str(folder), max_bytes, domain, always))
        return clips

    async def _answered(self, message: Callable[[int], Tokenize | Cut]) -> Any:
        await self.wait_until_up()
        number = next(self._numbers)
        reply = self._expect(number)
        self._send(message(number))
        try:
            return await reply
        except asyncio.CancelledError:
            if number in self._replies and self.up:
                self._send(Cancel(number))
            raise

    async def _spawn(self) -> Child:
        await _reclaim_arenas()  # the new arena may need their memory
        if self._forks is None:
            return await Child.start(_MODULE, self._setup)
        return await self._forks.start(_MODULE, self._setup, spare=True)

    async def _prepare(self, child: Child) -> None:
        self.traits = await child.ready(TokenizerTraits, f"the {self.noun}")

    def _take(self, message: bytes) -> None:
        reply = self._decoder.decode(message)
        self._starter.proved()
        if not isinstance(reply, Pong):
            _hand_over(reply, self._replies.pop(reply.number))

    def _ping(self) -> None:
        self._send(Ping())

    async def _close_child(self, why_down: str, hung: str = "") -> None:
        await super()._close_child(why_down, hung)
        await _reclaim_arenas()  # the arena still exists if the process was killed

    def _send(self, message: ToProcess) -> None:
        assert self.child is not None
        self.child.channel.send(self._encoder.encode(message))


async def _reclaim_arenas() -> None:
    with logged("the arenas of dead processes cannot be reclaimed"):
        await asyncio.to_thread(collect)


def _hand_over(reply: Tokenized | Planned | CutUp | Failed, waiting: asyncio.Future[Any]) -> None:
    if isinstance(reply, Failed):
        if not waiting.done():
            waiting.set_exception(reply.error.exception())
    elif isinstance(reply, CutUp):
        if not waiting.done():
            waiting.set_result(reply.clips)
    elif not waiting.done():
        waiting.set_result(reply.prompts())
    else:
        with logged("the blocks of an aborted request cannot be freed"):  # removing its directory frees them later
            for prompt in reply.prompts():
                if (prompt.ids < 0).any():
                    for ref in prompt.refs():
                        free(ref)
