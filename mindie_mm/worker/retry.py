"""The lifetime of a request's prompt, with early release of its blocks, and the recovery of its answers.

The blocks of a prompt are freed as soon as the engine has read them for all answers of the request. If an answer needs
the blocks later, the request is tokenized again.

An answer continues from the tokens that were drawn, so that its client does not notice these failures:

- The engine dies, once. The answer continues in the new engine, or in another engine of the service.
- The engine is replaced on purpose (EngineReloaded), any number of times.
- The engine needs blocks that were freed after use, because it preempted the answer, any number of times.
- The tokenizer dies during the request, or before the engine has read the blocks, once.

NoProcess is not retried, because the request has already waited for a process. If the checkpoint's weights were
replaced, an answer that has begun cannot continue (WeightsChanged). It starts again if nobody has received its parts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Self, TypeVar

import msgspec
import numpy as np

from mindie_mm.engine.requests.engine_messages import Origin, Progress, Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    ArenaFull,
    EngineReloaded,
    MindieMMError,
    ProcessDied,
    SegmentMissing,
    SharedMemoryError,
    StaleReference,
    WeightsChanged,
)
from mindie_mm.processes import faults
from mindie_mm.shm import free
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.deltas import Delta
from mindie_mm.worker.engine_replicas import EngineReplicas
from mindie_mm.worker.no_engine import NoEngine

Engine = AsyncEngine | EngineReplicas | NoEngine
T = TypeVar("T")
Part = TypeVar("Part", Progress, Delta)

_log = logging.getLogger(__name__)

ENDS_OF_ATTEMPTS = (ProcessDied, SegmentMissing, StaleReference)
"""Errors after which `Use.end_attempt` may allow another attempt."""


class PromptSource:
    """The prompt of a request. Its blocks are freed when unneeded, and written again when they are needed."""

    def __init__(
        self,
        prompt: Prompt,
        again: Callable[[], Awaitable[Prompt]] | None = None,
        *,
        retried: bool = False,
        on_remade: Callable[[Prompt], None] | None = None,
        deaths: int = 1,
    ) -> None:
        """Take ownership of `prompt`.

        Args:
            prompt: Prompt of the request.
            again: Function that tokenizes the prompt again. None means that the caller gave the ids and owns their
                blocks. The blocks are then never freed here, and it is an error if they are lost.
            retried: Whether this is already the second attempt, because a tokenizer died.
            on_remade: Function to call with each prompt that was tokenized again.
            deaths: Number of engine deaths that an answer survives.

        """
        self.deaths = deaths
        self.lora: str | None = None
        """Key of the LoRA adapter that computes the answers. Until the prompt ends, the adapter stays loaded."""
        self.prompt = prompt
        """Current prompt. Its blocks may have been freed."""
        self._num_holders = 0
        """Number of answers that need the blocks."""
        self._freed = False
        self._again = again
        self._retried = retried
        self._on_remade = on_remade
        self._reserved = 1
        self._lock = asyncio.Lock()

    @property
    def can_remake(self) -> bool:
        """True if the prompt can be tokenized again."""
        return self._again is not None

    def share(self, num_answers: int) -> None:
        """Keep the blocks until `num_answers` answers have begun and the engine has read the media for each answer."""
        self._reserved = num_answers

    async def hold(self, lost: Prompt | None, *, first: bool) -> Prompt:
        """Keep the blocks of the current prompt for a `Use`. Tokenize the prompt again if it is freed or `lost`."""
        async with self._lock:
            if self.prompt is lost or self._freed:
                self.prompt = await self._make_again()
                self._num_holders, self._freed = 0, False
            if first:
                self._reserved -= 1
            self._num_holders += 1
            return self.prompt

    def free(self, prompt: Prompt) -> None:
        """Record that a `Use` does not need the blocks. Free the blocks if no other `Use` needs them."""
        if prompt is not self.prompt:
            return  # it was lost
        self._num_holders -= 1
        if self._num_holders or self._reserved > 0 or self._again is None or not prompt.spans:
            return
        self._freed = True
        try:
            for ref in prompt.refs():
                free(ref)
        except SharedMemoryError as error:
            _log.warning("blocks cannot be freed before the request ends: %s", error)
        faults.point("freed-early")

    async def _make_again(self) -> Prompt:
        """Tokenize the prompt again. This may be repeated for a freed prompt, but not for a lost prompt."""
        freed = self._freed
        assert self._again is not None, "the blocks of the caller's ids are neither freed nor replaced"
        if self._retried and not freed:
            raise ProcessDied(
                "the request's media were lost twice because the tokenizer process died; send the request again"
            )
        self._retried = self._retried or not freed
        while True:
            try:
                prompt, _ = await retry_once(self._again)
                break
            except ArenaFull:  # an answer that has begun waits for memory until its deadline
                if not freed:
                    raise
        faults.point("remade")
        if self._on_remade is not None:
            self._on_remade(prompt)
        return prompt


class Use:
    """One answer's hold on a prompt. It keeps the prompt's blocks from `take` until `free`, or the context exits."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._deaths = source.deaths
        self._held: Prompt | None = None
        self._begun = self._lost = False

    async def take(self) -> Prompt:
        """Return the prompt for an attempt, and keep its blocks. If they were freed or lost, tokenize it again.

        Concurrent calls for several answers return the same prompt.

        Raises:
            ProcessDied: The prompt cannot be tokenized again.
            MindieMMError: The tokenizer failed.

        """
        if self._held is None or self._lost:
            self._held = await self._source.hold(self._held, first=not self._begun)
            self._begun, self._lost = True, False
        return self._held

    def free(self) -> None:
        """Free the blocks unless other answers need them, because the engine has read them or the answer has ended."""
        held, self._held = self._held, None
        if held is not None:
            self._source.free(held)

    def end_attempt(self, error: MindieMMError) -> None:
        """Raise `error`, one of `ENDS_OF_ATTEMPTS`, unless the answer may be attempted again."""
        if isinstance(error, ProcessDied):
            if isinstance(error, EngineReloaded):
                return
            if not self._deaths:
                raise error
            self._deaths -= 1
        elif self._held is not None:  # the engine could not read blocks that it has not released
            if not self._source.can_remake:
                raise error
            self._lost = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


async def retry_once(make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
    """Call `make`, and call it again if the tokenizer dies. Return the result, and whether the tokenizer died.

    One retry is enough, even if the tokenizer has lost its arena, because such a tokenizer dies at its next request.
    """
    try:
        return await make(), False
    except ProcessDied:
        return await make(), True


async def tokenized(
    stage: TokenizerStage, requests: Sequence[TokenizeRequest], on_remade: Callable[[Prompt], None] | None = None
) -> list[PromptSource]:
    """Tokenize the prompts of a request, and allocate the blocks of all their media together.

    A prompt that is tokenized again allocates only its own blocks. This cannot deadlock, because the engine can read
    this prompt without the other prompts of the request.

    Args:
        stage: Tokenizer to use.
        requests: Prompts of the request.
        on_remade: Function to call with each prompt that was tokenized again.

    Raises:
        ProcessDied: Two tokenizers died.
        MindieMMError: The tokenizer failed.

    """
    prompts, retried = await retry_once(partial(stage.tokenize_together, requests))
    return [
        PromptSource(prompt, partial(stage.tokenize, request), retried=retried, on_remade=on_remade)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


async def generated(
    engine: Engine,
    source: PromptSource,
    params: SamplingParams,
    request_id: str,
    begin: Callable[[], Callable[[Progress], Part | None]],
    written: Sequence[int] = (),
    discard: Callable[[], None] | None = None,
) -> AsyncGenerator[Part, None]:
    """Yield the parts of one answer. After a failure, continue from the tokens that have been drawn.

    This raises the errors of `AsyncEngine.generate`, and the errors below.

    Args:
        engine: Engine or engines to use.
        source: Prompt of the request.
        params: Sampling settings.
        request_id: Unique id of the request.
        begin: Function that returns the reader of a new answer. The reader turns the engine's progress into a part of
            the answer, or into None if there is no part. The first part with a finish reason ends the answer.
        written: Ids that follow the prompt, and that the output continues.
        discard: Function to call before the answer starts again, because the weights were replaced. None means that
            such an answer fails with WeightsChanged.

    Raises:
        WeightsChanged: The answer has begun, and the new engine has other weights.
        OperationalError: The prompt's media have changed since the answer began.

    """
    if params.seed is None and not params.greedy:  # so that the next engine draws from the same random numbers
        params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    later = msgspec.structs.replace(params, prompt_logprobs=None)  # they are sent with the first token
    asked_s = time.monotonic()
    read = begin()
    drawn_ids: list[int] = []
    origin: Origin | None = None
    first: Timings | None = None
    with Use(source) as use:
        while True:
            prompt, continues = await use.take(), bool(drawn_ids)
            ids = np.concatenate([prompt.ids, np.array(written, np.int64)])
            given = later if continues else params
            try:
                async with aclosing(engine.generate(request_id, ids, given, asked_s, [*drawn_ids], origin)) as steps:
                    async for step in steps:
                        if step.media_consumed:
                            use.free()
                        origin = step.origin or origin
                        first = first or step.timings
                        drawn_ids += step.token_ids
                        part = read(_timed(step, first) if continues else step)
                        if part is not None:
                            yield part
                            if part.finish_reason is not None:
                                return
                return
            except WeightsChanged:
                if discard is None:
                    raise
                discard()
                read, drawn_ids, origin, first = begin(), [], None, None
            except ENDS_OF_ATTEMPTS as error:
                use.end_attempt(error)


def _timed(step: Progress, first: Timings | None) -> Progress:
    """Return the progress of a later attempt with the times until the first token of the `first` attempt."""
    if step.timings is None or first is None:
        return step
    total_s = step.timings.queue_s + step.timings.prefill_s + step.timings.decode_s
    timings = msgspec.structs.replace(first, decode_s=total_s - first.queue_s - first.prefill_s)
    return msgspec.structs.replace(step, timings=timings)
