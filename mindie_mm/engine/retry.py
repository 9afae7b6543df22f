"""Retries of a request when a process dies, for the service and the library alike.

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
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from mindie_mm.errors import NoProcess, ProcessDied, SegmentMissing
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage import TokenizerStage

T = TypeVar("T")


class PromptSource:
    """A request's prompt, and a way to make it again if its blocks are lost."""

    def __init__(self, prompt: Prompt, again: Callable[[], Awaitable[Prompt]] | None = None) -> None:
        """Hold `prompt`. `again` makes it again; None means that it cannot be made again."""
        self.prompt = prompt
        """The current prompt."""
        self.on_settled: Callable[[], None] | None = None
        """Callback that drops the resources for another try."""
        self._again = again
        self._lock = asyncio.Lock()

    async def replace(self, lost: Prompt) -> Prompt:
        """Return the replacement of the prompt `lost`, whose blocks are gone. It is made once for all callers.

        Raises:
            ProcessDied: The prompt was lost again, or cannot be made again.

        """
        async with self._lock:
            if self.prompt is lost:
                again, self._again = self._again, None
                if again is None:
                    raise ProcessDied("the request's media were lost with their tokenizer, and there is no third try")
                self.prompt = await _made(again)
            return self.prompt

    def settle(self) -> None:
        """Rule out another try, because there is output of the prompt."""
        self._again = None
        if self.on_settled is not None:
            self.on_settled()


async def _made(make: Callable[[], Awaitable[Prompt]]) -> Prompt:
    """Make a prompt. Try twice, because a tokenizer that lost its arena dies at its next request, whatever that is."""
    try:
        return await make()
    except NoProcess:
        raise
    except ProcessDied:
        return await make()


async def tokenized(stage: TokenizerStage, request: TokenizeRequest) -> PromptSource:
    """Tokenize a request. Raise ProcessDied if two tokenizers die during it, and the errors of the stage."""
    try:
        return PromptSource(await stage.tokenize(request), lambda: stage.tokenize(request))
    except NoProcess:
        raise
    except ProcessDied:
        return PromptSource(await stage.tokenize(request))


async def generated(
    source: PromptSource, generate: Callable[[Prompt], AsyncGenerator[T, None]], void: T | None = None
) -> AsyncGenerator[T, None]:
    """Yield the outputs of `generate` for the source's prompt. Call it again if the engine or the blocks are lost.

    Args:
        source: Prompt of the request.
        generate: Function that yields the outputs for a prompt.
        void: Output that says that all outputs before it are void. None: outputs cannot be taken back, so there is no
            second call after the first output.

    Raises:
        ProcessDied: The engine died twice, or after outputs that cannot be taken back.

    """
    prompt, engine_died, begun = source.prompt, False, False
    while True:
        if begun and void is not None:
            yield void
        begun = False
        try:
            async with aclosing(generate(prompt)) as outputs:
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
            prompt = await source.replace(prompt)
