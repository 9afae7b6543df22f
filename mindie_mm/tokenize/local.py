"""Tokenizer stages in the caller's process, without a tokenizer process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from mindie_mm.decode import Decoders
from mindie_mm.decode.decoder_messages import DecoderSetup
from mindie_mm.media.guard import cancellation
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes.restarts import Restarts
from mindie_mm.processes.tasks import WorkThread, in_thread
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm import Arena, collect
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.stage.answer import answer
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.tokenize.stores import ArenaStore, ScriptStore
from mindie_mm.tokenize.tokenizer import Tokenizer


class _InCaller(TokenizerStage):
    """A stage in the caller's process. It is never restarted."""

    @property
    def pids(self) -> list[int]:
        return [os.getpid()]

    @property
    def restarts(self) -> Restarts:
        return Restarts(0, 0)

    def check(self) -> None:
        pass


class LocalTokenizer(_InCaller):
    """A tokenizer on a thread. Its inputs may contain Python objects, such as PIL images."""

    def __init__(self, tokenizer: Tokenizer, thread: WorkThread) -> None:
        """Take ownership of a tokenizer and its thread. Call `start` instead."""
        self._tokenizer = tokenizer
        self.chat_traits = tokenizer.chat_traits
        self.shown_tokens = tokenizer.shown_tokens
        """See `Tokenizer.shown_tokens`."""
        self._thread = thread

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Read the checkpoint and create the arena. Raise UnsupportedCheckpoint or SharedMemoryError if this fails.

        `max_decode_bytes` and `max_decode_s` do not apply, because they would limit the caller's own process.
        """
        thread = WorkThread("mindie_mm-tokenizer")
        tokenizers: list[Tokenizer] = []
        try:
            await thread.run(partial(collect, [default_spool()]))  # without a service, no other process collects
            await thread.run(lambda: tokenizers.append(_tokenizer(model_path, config)))
            return cls(tokenizers[0], thread)
        except BaseException:
            await in_thread(thread.close)  # the thread may still create an arena after a cancellation
            for tokenizer in tokenizers:
                tokenizer.close()
            raise

    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        given_up = threading.Event()
        try:
            return await self._thread.run(partial(self._answer, requests, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _answer(self, requests: Sequence[TokenizeRequest], given_up: threading.Event) -> list[Prompt]:
        with cancellation.until(given_up):
            return self._tokenizer.run(answer(self._tokenizer.prompts, requests))

    async def close(self) -> None:
        """Wait until the current request is done, then remove the arena."""
        self._thread.close()
        self._tokenizer.close()


class DecodingTokenizer(_InCaller):
    """A tokenizer with decoders that processes several requests at the same time, in the caller's event loop.

    It accepts the same inputs as LocalTokenizer.
    """

    def __init__(self, prompts: Prompts, decoders: Decoders) -> None:
        """Take ownership of prompts and the decoders that write their media. Call `start` instead."""
        self._prompts = prompts
        self._decoders = decoders
        self.chat_traits = prompts.chat_traits
        self.shown_tokens = prompts.shown_tokens
        """See `Tokenizer.shown_tokens`."""

    @classmethod
    async def start(cls, model_path: Path, config: WorkerConfig) -> Self:
        """Start `config.decoders` decoders, read the checkpoint and create the arena.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported.
            SharedMemoryError: The arena cannot be created.
            ProcessDied: The decoders cannot be started.

        """
        checkpoint = Checkpoint.open(model_path)
        async with AsyncExitStack() as undo:
            await in_thread(partial(collect, [default_spool()]))  # without a service, no other process collects
            arena = Arena.create(config.arena_bytes, quota_bytes=config.arena_request_bytes)
            preprocessed = Preprocessed(config.preprocessed_cache_bytes)
            store = ArenaStore(arena, config.arena_wait_s, preprocessed, is_own=True)
            undo.callback(store.close)
            decoders = Decoders(DecoderSetup(str(checkpoint.path), config.family, config.media), arena.capacity_bytes)
            await decoders.open(config.decoders)
            undo.push_async_callback(decoders.close)
            read = partial(
                Prompts,
                checkpoint,
                config.family,
                config.chat_template_content_format,
                config.parse_special,
                config.media,
                config.limit_mm_per_prompt,
                store,
                decoders,
            )
            tokenizer = cls(await in_thread(read), decoders)
            undo.pop_all()
        return tokenizer

    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        return await answer(self._prompts, requests)

    async def close(self) -> None:
        """End the decoders, then remove the arena."""
        try:
            await self._decoders.close()
        finally:
            self._prompts.stage.close()


def _tokenizer(path: Path, config: WorkerConfig) -> Tokenizer:
    """Create a tokenizer with an arena."""
    make = partial(Arena.create, config.arena_bytes, quota_bytes=config.arena_request_bytes)
    with ExitStack() as undo:
        store = ScriptStore(preprocessed=Preprocessed(config.preprocessed_cache_bytes), make=make)
        undo.callback(store.close)
        store.open()
        tokenizer = Tokenizer.from_pretrained(
            path,
            store,
            family=config.family,
            caps=config.media,
            content_format=config.chat_template_content_format,
            parse_special=config.parse_special,
            limit_mm_per_prompt=config.limit_mm_per_prompt,
        )
        undo.pop_all()
    return tokenizer
