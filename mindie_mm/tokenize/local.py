"""The tokenizer stage in the caller's own process: what the pool does, with no process to start."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from mindie_mm.config import WorkerConfig
from mindie_mm.restarts import Restarts
from mindie_mm.shm import Arena, collect
from mindie_mm.tokenize.answer import answer
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.tokenizer import Tokenizer
from mindie_mm.tokenize.wires import NativeWire


class LocalTokenizer:
    """One tokenizer on a thread; its inputs may hold what only this process has, such as PIL images."""

    def __init__(self, tokenizer: Tokenizer, arena: Arena) -> None:
        self._tokenizer = tokenizer
        self._arena = arena
        self.shown_tokens = tokenizer.shown_tokens
        """As `Tokenizer.shown_tokens`."""
        self._thread = ThreadPoolExecutor(1, "mindie_mm-tokenizer")

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Reads the checkpoint and makes the arena; UnsupportedCheckpoint, SharedMemoryError.

        The caller's memory is not limited: `max_decode_bytes` counts for processes alone.
        """
        await asyncio.to_thread(collect)  # no service runs here that would do it in time
        arena = Arena.create(config.arena_bytes, quota_bytes=config.arena_request_bytes)
        wire = NativeWire(arena, Preprocessed(config.preprocessed_cache_bytes))
        try:
            tokenizer = await asyncio.to_thread(
                Tokenizer.from_pretrained, model_path, wire, family=config.family, caps=config.media
            )
        except BaseException:
            arena.close()
            raise
        return cls(tokenizer, arena)

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
        return await asyncio.get_running_loop().run_in_executor(self._thread, answer, self._tokenizer, request)

    async def close(self) -> None:
        """Waits for the item in work, then removes the arena."""
        self._thread.shutdown()
        self._arena.close()
