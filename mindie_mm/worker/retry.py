"""The lifetime of a request's prompt, with early release of its blocks and retries when a process dies.

The blocks of a prompt are freed as soon as the engine has read them for all answers of the request. If an answer needs
the blocks later, the request is tokenized again. This happens if an answer is preempted, or if it starts again because
the engine died.

Until the client may have received output, a request survives these failures:

- The tokenizer dies during the request, or before the engine attaches its blocks. The request is tokenized again, once.
- The engine dies. The request is sent again, once, to the new engine, or to another engine of the service.
- The engine is replaced on purpose (EngineReloaded). The request is sent again.

NoProcess is not retried, because the request has already waited for a process. A stream is not retried after its first
output, because a second attempt could draw other tokens. If the client waits for a whole answer, the request can be
retried at any time, and tokens that were drawn before the failure are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mindie_mm.errors import ArenaFull, EngineReloaded, ProcessDied, SegmentMissing, SharedMemoryError
from mindie_mm.processes import faults
from mindie_mm.shm import free
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HeldPrompt:
    """One tokenization of a prompt, with the number of answers that need its blocks."""

    prompt: Prompt
    holders: int = 0
    """Number of answers that still need the blocks."""
    freed: bool = False


class PromptSource:
    """The prompt of a request. Its blocks are freed when unneeded, and written again when they are needed."""

    def __init__(
        self,
        prompt: Prompt,
        again: Callable[[], Awaitable[Prompt]] | None = None,
        *,
        retried: bool = False,
        on_remade: Callable[[Prompt], None] | None = None,
    ) -> None:
        """Take ownership of `prompt`.

        Args:
            prompt: Prompt of the request.
            again: Function that tokenizes the prompt again. None means that the caller gave the ids and owns their
                blocks. The blocks are then never freed here, and it is an error if they are lost.
            retried: Whether this is already the second attempt, because a tokenizer died.
            on_remade: Function to call with each prompt that was tokenized again.

        """
        self._current = _HeldPrompt(prompt)
        self._again = again
        self._retried = retried
        self._on_remade = on_remade
        self._reserved = 1
        self._lock = asyncio.Lock()

    @property
    def prompt(self) -> Prompt:
        """Current prompt. Its blocks may have been freed."""
        return self._current.prompt

    @property
    def can_remake(self) -> bool:
        """Whether the prompt can be tokenized again."""
        return self._again is not None

    def share(self, num_answers: int) -> None:
        """Keep the blocks until `num_answers` answers have begun and the engine has read the media for each answer."""
        self._reserved = num_answers

    def use(self) -> Use:
        """Return a `Use` of the prompt for one answer."""
        return Use(self)

    async def hold(self, lost: _HeldPrompt | None, *, first: bool) -> _HeldPrompt:
        """Keep the blocks of the current prompt for a `Use`. Tokenize the prompt again if it is freed or `lost`."""
        async with self._lock:
            if self._current is lost or self._current.freed:
                self._current = _HeldPrompt(await self._make_again(freed=self._current.freed))
            if first:
                self._reserved -= 1
            self._current.holders += 1
            return self._current

    def let_go(self, held: _HeldPrompt) -> None:
        """Record that a `Use` does not need the blocks. Free the blocks if no other `Use` needs them."""
        held.holders -= 1
        last = not held.holders and (held is not self._current or self._reserved <= 0)
        if not last or self._again is None or not held.prompt.spans:
            return
        held.freed = True
        try:
            for ref in held.prompt.refs():
                free(ref)
        except SharedMemoryError as error:
            _log.warning("blocks cannot be freed before the request ends: %s", error)
        faults.point("freed-early")

    async def _make_again(self, *, freed: bool) -> Prompt:
        """Tokenize the prompt again. This may be repeated for a `freed` prompt, but not for a lost prompt."""
        if self._again is None:
            raise SegmentMissing(
                "the engine needs the media of the prompt's token ids again, but they were released; release a path "
                "file only after the output is complete"
            )
        if self._retried and not freed:
            raise ProcessDied(
                "the request's media were lost twice because the tokenizer process died; send the request again"
            )
        self._retried = self._retried or not freed
        while True:
            try:
                prompt, _ = await _retry_once(self._again)
                break
            except ArenaFull:  # an answer that has begun waits for memory until its deadline
                if not freed:
                    raise
        faults.point("remade")
        if self._on_remade is not None:
            self._on_remade(prompt)
        return prompt


class Use:
    """One answer's hold on a prompt. It keeps the prompt's blocks from `take` until `release`."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._held: _HeldPrompt | None = None
        self._last: _HeldPrompt | None = None

    async def take(self) -> Prompt:
        """Return the prompt, and keep its blocks. If the blocks were freed, the prompt is tokenized again.

        Raises:
            ProcessDied: The prompt cannot be tokenized again.
            SegmentMissing: The caller gave the ids, and has released the blocks.
            MindieMMError: The tokenizer failed.

        """
        return self._held.prompt if self._held is not None else await self._hold(None)

    async def renew(self) -> Prompt:
        """Replace the last prompt, whose blocks the engine could not read. Return the new prompt.

        Concurrent calls for several answers return the same prompt. This raises the errors of `take`.
        """
        held, self._held = self._held, None
        try:
            return await self._hold(self._last)
        finally:  # release the old prompt last, because `hold` would otherwise treat a lost prompt as freed
            if held is not None:
                self._source.let_go(held)

    def release(self) -> None:
        """Release the blocks, because the engine has read them or the answer has ended."""
        held, self._held = self._held, None
        if held is not None:
            self._source.let_go(held)

    async def _hold(self, lost: _HeldPrompt | None) -> Prompt:
        self._held = await self._source.hold(lost, first=self._last is None)
        self._last = self._held
        return self._held.prompt


async def _retry_once(make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
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
    prompts, retried = await _retry_once(partial(stage.tokenize_together, requests))
    return [
        PromptSource(prompt, partial(stage.tokenize, request), retried=retried, on_remade=on_remade)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


async def generated(
    source: PromptSource, generate: Callable[[Prompt, Use], AsyncGenerator[T, None]], void: T | None = None
) -> AsyncGenerator[T, None]:
    """Yield the outputs of `generate` for the prompt. Call `generate` again if the engine dies or the blocks are lost.

    Args:
        source: Prompt of the request.
        generate: Function that yields the outputs for a prompt, and calls `Use.release` when the engine has read the
            blocks.
        void: Output after which the caller must discard all earlier outputs. If it is None, `generate` is not called
            again after its first output.

    Raises:
        ProcessDied: The engine died twice, or it died after an output and `void` is None.

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
            except ProcessDied as error:
                reloaded = isinstance(error, EngineReloaded)
                if (engine_died and not reloaded) or (begun and void is None):
                    raise
                engine_died = engine_died or not reloaded
            except SegmentMissing:
                if begun or not source.can_remake:
                    raise
                lost = True
    finally:
        use.release()
