"""What a request asks of the engine, whichever route it came by: its choices, as they grow or whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from mindie_mm.engine.requests.engine_messages import Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from mindie_mm.errors import InputError, LimitExceeded, RequestAborted
from mindie_mm.processes import faults
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Answer, Delta
from service.request.admission import cause_of_end
from service.request.prompts import prompt_of_ids, prompts
from service.request.state import Service
from service.request.token_text import prompt_text
from service.schemas.choices import Choice, Clock, Timed, timings
from service.telemetry import tracing

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_ANSWER_LOGPROBS = 2**20
"""Maximum number of log-probabilities in one answer, about 100 bytes each. One choice over the whole context may have
more."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request's use of the service."""

    service: Service
    params: SamplingParams
    n: int
    """Number of choices per prompt."""
    id: str
    """Id of the answer. The ids of its choices append an index."""
    clock: Clock
    timed: bool
    """Whether the answer contains timings."""
    _begun: set[int] = field(default_factory=set, init=False)
    """Indices of the choices that have begun. Each is counted when it ends."""

    @asynccontextmanager
    async def prompts(
        self, requests: Sequence[TokenizeRequest], truncate_to: int | None = None
    ) -> AsyncIterator[list[PromptSource]]:
        """As `line.prompts`, each within its room (`Worker.limited`); InputError also for a schema."""
        worker = self.service.worker
        with self._counted(len(requests)):
            await worker.check_schema(self.params)
            limited = [worker.limited(request, self.params, truncate_to) for request in requests]
            async with prompts(self.service, limited, self.clock) as sources:
                yield sources

    @asynccontextmanager
    async def prompts_of_ids(self, given: Sequence[Sequence[int]]) -> AsyncIterator[list[PromptSource]]:
        """The prompts that clients encoded; InputError also for a schema."""
        with self._counted(len(given)):
            await self.service.worker.check_schema(self.params)
            yield [PromptSource(prompt_of_ids(self.service, ids, "prompt")) for ids in given]

    async def choices(self, sources: Sequence[PromptSource]) -> list[Choice]:
        """Return all choices when they are finished."""
        choices = [Choice(index=index) for index in range(len(sources) * self.n)]
        async with aclosing(self.deltas(sources, whole=True)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        return choices

    def timings(self, choices: Sequence[Answer]) -> Timed:
        """Return the answer's `timings`, or nothing if the request does not ask for them."""
        return {"timings": timings(self.clock, choices)} if self.timed else {}

    async def deltas(
        self, sources: Sequence[PromptSource], *, whole: bool = False
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the outputs of `n` choices per prompt as they arrive, each with the index of its choice.

        Choices are numbered prompt by prompt. `whole` is as in `Worker.generate`.
        """
        n = self.n
        self._require_room(sources)
        failed: list[str] = []
        firsts = [asyncio.get_running_loop().create_future() for _ in sources]
        streams = [
            self._measured(sources[index // n], index, failed, firsts[index // n], whole=whole)
            for index in range(len(sources) * n)
        ]
        for source in sources:
            source.share(n)
            self.service.metrics.count_prompt(len(source.prompt), n, self.params.max_tokens)
            if self.service.config.log_prompts:
                text = prompt_text(self.service.worker.tokenizer, source.prompt)
                _log.info("prompt of %d tokens: %s", len(source.prompt), text)
        if (trace := tracing.current.get()) is not None:
            trace.asked(self.params, n, sum(len(source.prompt) for source in sources))
        begun: set[int] = set()
        lengths = [0] * len(streams)
        async with aclosing(_merged(streams)) as deltas:
            async for index, delta in deltas:
                lengths[index] = 0 if delta.restarted else lengths[index] + len(delta.token_ids)
                faults.point("next-delta" if index in begun else "first-delta")
                begun.add(index)
                yield index, delta
        for start in range(0, len(lengths), n):
            self.service.metrics.count_longest(max(lengths[start : start + n]))

    def _require_room(self, sources: Sequence[PromptSource]) -> None:
        """Raise LimitExceeded if the answer may hold too many log-probabilities."""
        params, context = self.params, self.service.worker.engine.info.max_model_len
        found = 0
        for source in sources:
            num_prompt = len(source.prompt)
            if params.prompt_logprobs is not None:
                found += self.n * num_prompt * (params.prompt_logprobs + 1)
            if params.logprobs is not None:
                most = params.most_tokens(max(context - num_prompt, 0))
                found += self.n * most * (params.logprobs + 1)
        limit = max(MAX_ANSWER_LOGPROBS, context * (MAX_LOGPROBS + 1))
        if found > limit:
            raise LimitExceeded(
                f"the answer may have {found} log-probabilities (choices x tokens x those of a token), the limit is "
                f"{limit}: ask for fewer choices, max_tokens or logprobs"
            )

    async def _measured(
        self,
        source: PromptSource,
        index: int,
        failed: list[str],
        prompt_logprobs: asyncio.Future[list[TokenLogprob]],
        *,
        whole: bool,
    ) -> AsyncGenerator[Delta, None]:
        """Yield the output of one choice, and count, time and trace it. `failed` collects reasons of failed choices.

        One that is ended because another failed counts as that one. Latencies count from the arrival.
        The prompt's first choice sets its `prompt_logprobs`; the others, which have the same, wait for them.
        """
        metrics, trace = self.service.metrics, tracing.current.get()
        asked = time.perf_counter()
        first = last = self.clock.arrived
        num_tokens = num_drawn = 0
        reason, ended, stages = "", False, None
        self._begun.add(index)
        params, shared, found = self._seeded(index % self.n), None, None
        try:
            if index % self.n and params.prompt_logprobs is not None:
                found = shared = await prompt_logprobs
                params = msgspec.structs.replace(params, prompt_logprobs=None)
            outputs = self.service.worker.generate(source, params, f"{self.id}-{index}", whole=whole)
            async with aclosing(outputs) as deltas:
                async for delta in deltas:
                    if delta.restarted:
                        num_tokens, found = 0, shared
                        yield delta
                        continue
                    if delta.prompt_logprobs is not None and not prompt_logprobs.done():
                        prompt_logprobs.set_result(delta.prompt_logprobs)
                    now = time.perf_counter()
                    (metrics.inter_token_s if num_drawn else metrics.first_token_s).observe(now - last)
                    first, last = first if num_drawn else now, now
                    num_drawn += len(delta.token_ids)
                    num_tokens += len(delta.token_ids)
                    metrics.count_tokens(len(delta.token_ids))
                    reason = delta.finish_reason or reason
                    ended = delta.finish_reason is not None
                    stages = delta.timings
                    told = delta if found is None else replace(delta, prompt_logprobs=found)
                    found = None  # with the first alone
                    yield told
        except Exception as error:
            reason = _reason(error)
            failed.append(reason)
            metrics.count_error(error)
            if trace is not None:
                trace.error = type(error).__name__
            raise
        finally:
            reason = reason or (failed[0] if failed else _reason(None))
            self._count(reason, num_tokens, stages if ended else None)
            if trace is not None and stages is not None:
                trace.answered(index, asked, first, last, num_tokens, stages)

    @contextmanager
    def _counted(self, num_prompts: int) -> Iterator[None]:
        """Counts the choices that an error ends before they are begun."""
        try:
            yield
        except BaseException as error:
            for _ in range(num_prompts * self.n - len(self._begun)):
                self._count(_reason(error if isinstance(error, Exception) else None), 0, None)
            raise

    def _count(self, reason: str, num_tokens: int, timings: Timings | None) -> None:
        """As `Metrics.count_choice`."""
        self.service.metrics.count_choice(reason, num_tokens, timings)
        self.service.metrics.e2e_s.observe(time.perf_counter() - self.clock.arrived)

    def _seeded(self, index: int) -> SamplingParams:
        """Return the settings of a prompt's choice `index`. Seeds are consecutive and wrap around in int64."""
        if self.params.seed is None or not index:
            return self.params
        return msgspec.structs.replace(self.params, seed=(self.params.seed + index + 2**63) % 2**64 - 2**63)


def _reason(error: Exception | None) -> str:
    """Return the metrics' reason for a choice that `error` or a cancellation has ended.

    It is `abort` if the client disconnected, `refused` if the request cannot be answered, else `error`, which includes
    deadlines and stops.
    """
    cause = error or cause_of_end()
    if isinstance(cause, RequestAborted | None):
        return "abort"
    return "refused" if isinstance(cause, InputError) else "error"


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with the index of its stream. Close all streams at exit."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                found = task.result()
                if found is None:
                    continue
                waiting[asyncio.create_task(_next(streams[index]))] = index
                yield index, found
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)
