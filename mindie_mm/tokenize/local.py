"""The tokenizer stage on a thread of the caller's process, in place of a process of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from mindie_mm.config import WorkerConfig
from mindie_mm.environment import default_spool
from mindie_mm.media import cancellation
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.restarts import Restarts
from mindie_mm.shm import Arena, collect
from mindie_mm.tasks import WorkThread
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.room import Room
from mindie_mm.tokenize.tokenizer import Tokenizer
from mindie_mm.tokenize.wires import NativeWire


class LocalTokenizer:
    """One tokenizer on a thread. Its inputs may hold objects of this process, such as PIL images."""

    def __init__(self, tokenizer: Tokenizer, thread: WorkThread) -> None:
        """Hold a tokenizer and its thread. Use `start` to create them."""
        self._tokenizer = tokenizer
        self.shown_tokens = tokenizer.shown_tokens
        """As `Tokenizer.shown_tokens`."""
        self._thread = thread

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Read the checkpoint and create the arena. Raise UnsupportedCheckpoint or SharedMemoryError.

        Without `config.decoders`, items are decoded on the thread. Then `max_decode_bytes` and `max_decode_s` do not
        apply, because they would limit the caller's own process.
        """
        thread = WorkThread("mindie_mm-tokenizer")
        try:
            await thread.run(partial(collect, [default_spool()]))  # no service does this here
            return cls(await thread.run(partial(_tokenizer, model_path, config)), thread)
        except BaseException:
            thread.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of the caller's process."""
        return [os.getpid()]

    @property
    def restarts(self) -> Restarts:
        """Always zero."""
        return Restarts(0, 0)

    def check(self) -> None:
        """Nothing: it lives as long as its caller."""

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """Return the request's prompt. Errors are those of Tokenizer. A request that is cancelled ends soon.

        With decoders, requests do not wait for each other.
        """
        if self._tokenizer.has_decoders:
            return await self._tokenizer.answer_beside(request)
        given_up = threading.Event()
        try:
            return await self._thread.run(partial(self._answer, request, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _answer(self, request: TokenizeRequest, given_up: threading.Event) -> Prompt:
        with cancellation.until(given_up):
            return self._tokenizer.answer(request)

    async def close(self) -> None:
        """End the requests in progress, then remove the arena. Without decoders, wait for the one in progress."""
        self._thread.close()
        self._tokenizer.close()


def _tokenizer(path: Path, config: WorkerConfig) -> Tokenizer:
    """Return a tokenizer with an arena, which decodes by itself unless `config.decoders` asks for processes."""
    make = partial(Arena.create, config.arena_bytes, quota_bytes=config.arena_request_bytes)
    preprocessed = Preprocessed(config.preprocessed_cache_bytes)
    with ExitStack() as undo:
        if config.decoders:
            room = Room(make(), config.arena_wait_s, is_own=True)
            undo.callback(room.close)
            tokenizer = Tokenizer.with_decoders(Checkpoint.open(path), config, room, preprocessed)
        else:
            wire = NativeWire(preprocessed=preprocessed, make=make)
            undo.callback(wire.close)
            wire.open()
            tokenizer = Tokenizer.from_pretrained(
                path,
                wire,
                family=config.family,
                caps=config.media,
                content_format=config.chat_template_content_format,
            )
        undo.pop_all()
    return tokenizer
