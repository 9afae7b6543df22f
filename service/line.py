"""A request's way through the worker: spool, tokenise, generate, free."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from mindie_mm import faults
from mindie_mm.engine.retry import PromptSource
from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.engine.worker import Delta
from mindie_mm.errors import InputError, RequestAborted, TokenOutOfRange
from mindie_mm.inputs import Media, from_webui_prompt, media_of, media_of_messages, parse_inputs, parse_messages
from mindie_mm.shm import request_directory
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt
from service import tracing
from service.admission import cause_of_end
from service.choices import Clock
from service.media import gather, messages_with_paths, remove_media, with_paths
from service.state import Service
from service.token_text import prompt_text

T = TypeVar("T")

_log = logging.getLogger(__name__)


@asynccontextmanager
async def tokenized(service: Service, request: TokenizeRequest, clock: Clock) -> AsyncIterator[PromptSource]:
    """The prompt of `request`, whose media are as the client gave them; leaving frees its shared memory.

    The media's files stay, for a second try, until `generate` has the first output of every choice.
    """
    async with all_tokenized(service, [request], clock) as (source,):
        yield source


@asynccontextmanager
async def all_tokenized(
    service: Service, requests: Sequence[TokenizeRequest], clock: Clock
) -> AsyncIterator[list[PromptSource]]:
    """The prompts of one HTTP request, whose limits hold for all of them together; else as `tokenized`."""
    started = time.perf_counter()
    for request in requests:
        _check_values(request)
    parsed = [_parsed(request, service.config.max_media_items) for request in requests]
    media = [item for found, _ in parsed for item in found]
    with ExitStack() as stack:
        changes: dict[str, Any] = {}
        paths: Iterator[Path] = iter(())
        if media:
            directory = stack.enter_context(request_directory(service.spool))
            changes["path_file"] = str(directory.path_file)
            paths = iter(await service.media.spool(media, directory.path))
            clock.fetch_s = time.perf_counter() - started
            faults.point("spooled")
        complete = [msgspec.structs.replace(with_files(paths), **changes) for _, with_files in parsed]
        sources = await gather([service.worker.tokenize(one) for one in complete])
        faults.point("tokenized")
        elapsed_s = time.perf_counter() - started
        clock.preprocess_s = elapsed_s - clock.fetch_s
        service.metrics.tokenize_s.observe(elapsed_s)
        if (trace := tracing.current.get()) is not None:
            trace.tokenized(started, clock.fetch_s, clock.preprocess_s)
        if media:
            _when_all_settle(sources, lambda: remove_media(directory.path))
        yield sources


def _parsed(
    request: TokenizeRequest, max_images: int
) -> tuple[list[Media], Callable[[Iterator[Path]], TokenizeRequest]]:
    """The media of a request, and what makes it one whose media are files; InputError and below."""
    replace = msgspec.structs.replace
    if request.messages is not None:
        messages = parse_messages(request.messages)
        return media_of_messages(messages), lambda paths: replace(
            request, messages=messages_with_paths(messages, paths)
        )
    if request.items is not None:
        items = parse_inputs(request.items)
        return media_of(items), lambda paths: replace(request, items=with_paths(items, paths))
    pieces = from_webui_prompt(request.text or "", max_images)
    if media := media_of(pieces):
        return media, lambda paths: replace(request, text=None, items=with_paths(pieces, paths), chat=False)
    return [], lambda _: request


def _when_all_settle(sources: Sequence[PromptSource], drop: Callable[[], None]) -> None:
    """Calls `drop` once no source may need a further try."""
    left = len(sources)

    def settled() -> None:
        nonlocal left
        left -= 1
        if not left:
            drop()

    for source in sources:
        source.on_settled = settled


def _check_values(request: TokenizeRequest) -> None:
    """InputError for what JSON can hold and the tokenizers' messages cannot, in fields that pass through unread."""
    try:
        msgspec.msgpack.encode(request)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InputError(
            "the request holds an integer above 64 bits, a lone surrogate or too deep a nesting"
        ) from error


async def generate(
    service: Service, sources: Sequence[PromptSource], params: SamplingParams, n: int, request_id: str, clock: Clock
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Outputs of `n` choices for each prompt, as they come, each with its choice's index: prompt by prompt.

    Choices of a seeded request draw from seeds that follow one another, the least int64 behind the greatest. Latencies
    count from the clock's `arrived`.
    """
    choices = []
    failed: list[str] = []
    for index in range(len(sources) * n):
        seeded = params
        if params.seed is not None and index % n:
            seeded = msgspec.structs.replace(params, seed=_wrapped(params.seed + index % n))
        choices.append(_measured(service, sources[index // n], seeded, request_id, index, clock.arrived, failed))
    for source in sources:
        service.metrics.count_prompt(len(source.prompt), n, params.max_tokens)
        if service.config.log_prompts:
            text = prompt_text(service.worker.tokenizer, source.prompt)
            _log.info("prompt of %d tokens: %s", len(source.prompt), text)
    if (trace := tracing.current.get()) is not None:
        trace.asked(params, n, sum(len(source.prompt) for source in sources))
    silent = [set(range(n)) for _ in sources]  # each prompt's choices that have given no output yet
    async with aclosing(merge(choices)) as deltas:
        async for index, delta in deltas:
            waiting = silent[index // n]
            if index % n in waiting:
                waiting.remove(index % n)
                faults.point("first-delta")
                if not waiting:
                    sources[index // n].settle()
            else:
                faults.point("next-delta")
            yield index, delta


def _wrapped(seed: int) -> int:
    """`seed` as an int64 that overflows."""
    return (seed + 2**63) % 2**64 - 2**63


async def _measured(
    service: Service,
    source: PromptSource,
    params: SamplingParams,
    request_id: str,
    index: int,
    arrived: float,
    failed: list[str],
) -> AsyncGenerator[Delta, None]:
    """One choice, counted, timed and traced. `failed` has the reasons of the request's choices that failed.

    One that ends unfinished counts as an `error`, unless its client gave it up (`abort`) or it cannot be answered
    (`refused`); one that is ended because another failed counts as that one.
    """
    metrics, trace = service.metrics, tracing.current.get()
    asked = time.perf_counter()
    first = last = arrived
    num_tokens = 0
    reason, ended, timings = "abort", False, None
    try:
        async with aclosing(service.worker.generate(source, params, f"{request_id}-{index}")) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                (metrics.inter_token_s if num_tokens else metrics.first_token_s).observe(now - last)
                first, last = first if num_tokens else now, now
                num_tokens += len(delta.token_ids)
                metrics.count_tokens(len(delta.token_ids))
                reason = delta.finish_reason or reason
                ended = delta.finish_reason is not None
                timings = delta.timings
                yield delta
    except Exception as error:
        reason = "refused" if isinstance(error, InputError) else "error"
        failed.append(reason)
        metrics.count_error(error)
        if trace is not None:
            trace.error = type(error).__name__
        raise
    finally:
        if reason == "abort" and failed:
            reason = failed[0]
        elif reason == "abort" and not isinstance(cause_of_end(), RequestAborted | None):
            reason = "error"  # its deadline, or the service's stop
        metrics.count_choice(reason, num_tokens, timings if ended else None)
        metrics.e2e_s.observe(time.perf_counter() - arrived)
        if trace is not None and timings is not None:
            trace.answered(index, asked, first, last, num_tokens, timings)


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What the streams give, as it comes, each with its stream's index; leaving closes them all."""
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


def prompt_of_ids(service: Service, ids: Sequence[int]) -> Prompt:
    """A prompt of token ids from a client. TokenOutOfRange unless all are in [0, vocabulary)."""
    vocab_size = service.worker.engine.info.vocab_size
    if (bad := next((i for i in ids if not 0 <= i < vocab_size), None)) is not None:
        raise TokenOutOfRange(f"token id {bad} is outside the vocabulary, [0, {vocab_size})")
    return Prompt(np.array(ids, np.int64))
