"""The tokenizer stage in the caller's own process: what the pool does, with no process to start."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Self

from mindie_mm.config import WorkerConfig
from mindie_mm.environment import default_spool
from mindie_mm.restarts import Restarts
from mindie_mm.shm import Arena, collect
from mindie_mm.tasks import WorkThread
from mindie_mm.tokenize.answer import answer
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.tokenizer import Tokenizer
from mindie_mm.tokenize.wires import NativeWire


class LocalTokenizer:
    """One tokenizer on a thread; its inputs may hold what only this process has, such as PIL images."""

    def __init__(self, tokenizer: Tokenizer, thread: WorkThread) -> None:
        """For `start`."""
        self._tokenizer = tokenizer
        self.shown_tokens = tokenizer.shown_tokens
        """As `Tokenizer.shown_tokens`."""
        self._thread = thread

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Read the checkpoint and make the arena; UnsupportedCheckpoint, SharedMemoryError.

        The caller's memory is not limited: `max_decode_bytes` counts for processes alone.
        """
        make = partial(Arena.create, config.arena_bytes, quota_bytes=config.arena_request_bytes)
        wire = NativeWire(preprocessed=Preprocessed(config.preprocessed_cache_bytes), make=make)
        read = partial(Tokenizer.from_pretrained, model_path, wire, family=config.family, caps=config.media)
        thread = WorkThread("mindie_mm-tokenizer")
        try:
            await thread.run(partial(collect, [default_spool()]))  # no service runs here that would do it in time
            wire.open()
            return cls(await thread.run(read), thread)
        except BaseException:
            thread.stop()
            wire.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The caller's own process."""
        return [os.getpid()]

    @property
    def restarts(self) -> Restarts:
        """None, ever."""
        return Restarts(0, 0)

    def check(self) -> None:
        """Nothing: it lives as long as its caller."""

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The request's prompt; errors as Tokenizer."""
        return await self._thread.run(partial(answer, self._tokenizer, request))

    async def close(self) -> None:
        """Wait for the item in work, then remove the arena."""
        self._thread.close()
        self._tokenizer.close()
