"""A tokenizer in the caller's process, without a tokenizer process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from mindie_mm.inputs import Media
from mindie_mm.media.guard import cancellation
from mindie_mm.processes.alone import run_alone
from mindie_mm.processes.restarts import Restarts
from mindie_mm.processes.tasks import WorkThread, in_thread
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm import collect
from mindie_mm.shm.owner.arena import DEFAULT_TIMEOUT_S
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.prompt import PlannedPrompt, Prompt
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.setup import Setup
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.tokenize.stores import ArenaStore

T = TypeVar("T")


class LocalTokenizer(TokenizerStage):
    """A tokenizer in the caller's process. It is never restarted. Inputs may contain Python objects, such as images.

    Without decoders, it makes one prompt at a time on a thread. With decoders, it makes several prompts at the same
    time in the caller's event loop.
    """

    def __init__(self, prompts: Prompts, thread: WorkThread | None, resources: AsyncExitStack) -> None:
        """Take ownership of the arguments. Call `start` instead.

        `thread` is the thread that makes the prompts, or None if the caller's event loop makes them.
        """
        self._prompts = prompts
        self._thread = thread
        self._resources = resources
        self.traits = prompts.traits

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Start `config.decoders` decoders, create the arena and read the checkpoint.

        Without decoders, `max_decode_bytes` and `max_decode_s` do not apply, because they would limit the caller's own
        process.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported.
            SharedMemoryError: The arena cannot be created.
            ProcessDied: The decoders cannot be started.

        """
        setup = msgspec.structs.replace(Setup.of(model_path, config), num_decoders=config.decoders)
        if not setup.num_decoders:  # a prompt that waits for memory holds up all other prompts
            setup = msgspec.structs.replace(setup, arena_wait_s=min(setup.arena_wait_s, DEFAULT_TIMEOUT_S))
        store, thread = ArenaStore.of(setup), None
        async with AsyncExitStack() as resources:
            await in_thread(partial(collect, [default_spool()]))  # without a service, no other process collects
            resources.callback(store.close)
            await in_thread(store.open)
            if setup.num_decoders:
                prompts = await Prompts.open(setup, store, resources)
            else:
                thread = WorkThread("mindie_mm-tokenizer")
                resources.push_async_callback(in_thread, thread.close)  # before the store, which a job may still use
                prompts = await thread.run(partial(Prompts, setup, store))
            return cls(prompts, thread, resources.pop_all())

    @property
    def pids(self) -> list[int]:
        return [os.getpid()]

    @property
    def restarts(self) -> Restarts:
        return Restarts(0, 0)

    def check(self) -> None:
        pass

    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        return await self._run(lambda: self._prompts.make(requests))

    async def plan(self, requests: Sequence[TokenizeRequest], *, fill: bool = False) -> list[PlannedPrompt]:
        return await self._run(lambda: self._prompts.plan(requests, fill=fill))

    async def cut(
        self, speech: Media, folder: Path, max_bytes: int, domain: tuple[bytes, str], *, always: bool
    ) -> Clips:
        return await self._run(lambda: self._prompts.stage.cut(speech, folder, max_bytes, domain, always=always))

    async def _run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the caller's event loop, or on the thread, which reads no further source if canceled."""
        if self._thread is None:
            return await begin()
        given_up = threading.Event()

        def work() -> T:
            with cancellation.until(given_up):
                return run_alone(begin())

        try:
            return await self._thread.run(work)
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def close(self) -> None:
        """Wait until the current prompt is done, end the decoders and remove the arena."""
        await self._resources.aclose()
