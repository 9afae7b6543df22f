"""A request's prompt for as long as its answer needs it: early release of its blocks, and retries when a process dies.

The blocks of a prompt are freed as soon as the engine has consumed them for all answers about it. An answer that needs
them after that gets the prompt made again: a preempted answer, and one that starts again because the engine died.

While the client cannot have received output, a request survives these deaths:

- The tokenizer died during the request, or before the engine attached its blocks. The request is tokenized once more.
- The engine died. The request is sent once more, to the next engine.

NoProcess is not retried, because the request has already waited for a process. A streaming client may have received the
first output, and a second try would draw other tokens, so nothing is retried after that. A client that gets a whole
answer receives nothing before the end. The tokens drawn before the death are dropped, and the same seed draws the same
tokens again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mindie_mm.errors import ArenaFull, NoProcess, ProcessDied, SegmentMissing, SharedMemoryError
from mindie_mm.processes import faults
from mindie_mm.shm import free
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HeldPrompt:
    """A prompt as it was made once, with the number of answers that need its blocks."""

    prompt: Prompt
    holders: int = 0
    """Answers whose media the engine has not consumed."""
    freed: bool = False


class PromptSource:
    """A request's prompt, whose blocks are freed when no answer needs them, and made again when one does."""

    def __init__(
        self,
        prompt: Prompt,
        again: Callable[[], Awaitable[Prompt]] | None = None,
        *,
        retried: bool = False,
        on_remade: Callable[[Prompt], None] | None = None,
    ) -> None:
        """Hold `prompt`.

        Args:
            prompt: Prompt of the request.
            again: Makes the prompt again. None: it cannot be made again, and its blocks are never freed here.
            retried: Whether the prompt is a second try already, because a tokenizer died.
            on_remade: Called with each prompt that was made again.

        """
        self._current = _HeldPrompt(prompt)
        self._again = again
        self._retried = retried
        self._on_remade = on_remade
        self._reserved = 1
        self._lock = asyncio.Lock()

    @property
    def prompt(self) -> Prompt:
        """The current prompt. Its blocks may be freed."""
        return self._current.prompt

    def share(self, num_answers: int) -> None:
        """Keep the blocks until so many answers have begun, and the engine has consumed the media of each."""
        self._reserved = num_answers

    def use(self) -> Use:
        """Return the use of the prompt by one answer."""
        return Use(self)

    async def hold(self, lost: _HeldPrompt | None, *, first: bool) -> _HeldPrompt:
        """For `Use`: hold the blocks of the current prompt. Make it again if they are freed, or if it is `lost`."""
        async with self._lock:
            if self._current is lost or self._current.freed:
                self._current = _HeldPrompt(await self._make_again(freed=self._current.freed))
            if first:
                self._reserved -= 1
            self._current.holders += 1
            return self._current

    def let_go(self, held: _HeldPrompt) -> None:
        """For `Use`: end a hold. The last one frees the blocks."""
        held.holders -= 1
        last = not held.holders and (held is not self._current or self._reserved <= 0)
        if not last or self._again is None or not held.prompt.spans:
            return
        held.freed = True
        try:
            for ref in held.prompt.refs():
                free(ref)
        except SharedMemoryError as error:
            _log.warning("blocks stay until the request ends: %s", error)
        faults.point("freed-early")

    async def _make_again(self, *, freed: bool) -> Prompt:
        """Make the prompt again: whenever its blocks were `freed`, and once if they were lost."""
        if self._again is None or (self._retried and not freed):
            raise ProcessDied("the request's media were lost with their tokenizer, and there is no third try")
        self._retried = self._retried or not freed
        while True:
            try:
                prompt = await _make_twice(self._again)
                break
            except ArenaFull:  # an answer that was begun waits for room as it waits for the engine: up to its deadline
                if not freed:
                    raise
        faults.point("remade")
        if self._on_remade is not None:
            self._on_remade(prompt)
        return prompt


class Use:
    """One answer's use of a prompt. It holds the prompt's blocks from `take` to `release`."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._held: _HeldPrompt | None = None
        self._last: _HeldPrompt | None = None

    async def take(self) -> Prompt:
        """Return the prompt, and hold its blocks. The prompt is made again if they were freed.

        Raises:
            ProcessDied: The prompt cannot be made again.
            MindieMMError: The tokenizer's error.

        """
        return self._held.prompt if self._held is not None else await self._hold(None)

    async def renew(self) -> Prompt:
        """Return another prompt in place of the last one, whose blocks the engine could not read.

        Answers that ask at the same time get the same prompt. Errors are those of `take`.
        """
        held, self._held = self._held, None
        try:
            return await self._hold(self._last)
        finally:  # not before, because blocks that are lost while they are held are not the same as freed ones
            if held is not None:
                self._source.let_go(held)

    def release(self) -> None:
        """Let go of the blocks, because the engine has consumed them or the answer has ended."""
        held, self._held = self._held, None
        if held is not None:
            self._source.let_go(held)

    async def _hold(self, lost: _HeldPrompt | None) -> Prompt:
        self._held = await self._source.hold(lost, first=self._last is None)
        self._last = self._held
        return self._held.prompt


async def _make_twice(make: Callable[[], Awaitable[Prompt]]) -> Prompt:
    """Make a prompt. Try twice, because a tokenizer that lost its arena dies at its next request, whatever that is."""
    try:
        return await make()
    except NoProcess:
        raise
    except ProcessDied:
        return await make()


async def tokenized(
    stage: TokenizerStage, requests: Sequence[TokenizeRequest], on_remade: Callable[[Prompt], None] | None = None
) -> list[PromptSource]:
    """Tokenize the prompts of a request, whose media get room together.

    A prompt that is made again gets room by itself. That is no deadlock: the engine can consume it without the others.

    Raises ProcessDied if two tokenizers die during it, and the errors of the stage.
    """
    retried = False
    try:
        prompts = await stage.tokenize_together(requests)
    except NoProcess:
        raise
    except ProcessDied:
        prompts, retried = await stage.tokenize_together(requests), True
    return [
        PromptSource(prompt, partial(stage.tokenize, request), retried=retried, on_remade=on_remade)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


async def generated(
    source: PromptSource, generate: Callable[[Prompt, Use], AsyncGenerator[T, None]], void: T | None = None
) -> AsyncGenerator[T, None]:
    """Yield the outputs of `generate` for the source's prompt. Call it again if the engine or the blocks are lost.

    Args:
        source: Prompt of the request.
        generate: Function that yields the outputs for a prompt, and releases its use when the engine has consumed it.
        void: Output that says that all outputs before it are void. None: outputs cannot be taken back, so there is no
            second call after the first output.

    Raises:
        ProcessDied: The engine died twice, or after outputs that cannot be taken back.

    """
    use = source.use()
    engine_died = begun = lost = False
    try:
        while True:
            prompt = await (use.renew() if lost else use.take())
            if begun and void is not None:
                yield void
            begun = lost = False
            try:
                async with aclosing(generate(prompt, use)) as outputs:
                    async for output in outputs:
                        begun = True
                        yield output
                return
            except NoProcess:
                raise
            except ProcessDied:
                if engine_died or (begun and void is None):
                    raise
                engine_died = True
            except SegmentMissing:
                if begun:
                    raise
                lost = True
    finally:
        use.release()
