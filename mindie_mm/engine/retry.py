"""What of a request is tried again when a process dies: the one rule, for the service and the library alike.

Until a request's client may have had output, a death costs it time:

- its tokenizer died over it, or before the engine had attached its blocks: it is tokenised again, once;
- the engine died: it is sent to the engine that is started in its place, once.

Where none came back in time (NoProcess) it has waited for that already. A client that streams may have the first output
already, and drawn tokens would be others: after that nothing is tried again. One that is answered whole has nothing
until the end: what was drawn before the engine died is void, and the same seed draws the same again.
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
    """A request's prompt, and another one should its blocks be lost."""

    def __init__(self, prompt: Prompt, again: Callable[[], Awaitable[Prompt]] | None = None) -> None:
        """`again` makes the prompt anew; None: there is no further try."""
        self.prompt = prompt
        """As it is now."""
        self.on_settled: Callable[[], None] | None = None
        """Drops what a further try would need."""
        self._again = again
        self._lock = asyncio.Lock()

    async def replace(self, lost: Prompt) -> Prompt:
        """The prompt in place of `lost`, whose blocks are gone: made once, for all who lost it. ProcessDied."""
        async with self._lock:
            if self.prompt is lost:
                again, self._again = self._again, None
                if again is None:
                    raise ProcessDied("the request's media were lost with their tokenizer, and there is no third try")
                self.prompt = await _made(again)
            return self.prompt

    def settle(self) -> None:
        """Whoever uses the prompt has had output of it: there is no further try."""
        self._again = None
        if self.on_settled is not None:
            self.on_settled()


async def _made(make: Callable[[], Awaitable[Prompt]]) -> Prompt:
    """A tokenizer whose arena was lost ends over the next request: that is no fault of the request's."""
    try:
        return await make()
    except NoProcess:
        raise
    except ProcessDied:
        return await make()


async def tokenized(stage: TokenizerStage, request: TokenizeRequest) -> PromptSource:
    """The request's prompt; ProcessDied if two tokenizers die over it, other errors as the stage's."""
    try:
        return PromptSource(await stage.tokenize(request), lambda: stage.tokenize(request))
    except NoProcess:
        raise
    except ProcessDied:
        return PromptSource(await stage.tokenize(request))


async def generated(
    source: PromptSource, generate: Callable[[Prompt], AsyncGenerator[T, None]], void: T | None = None
) -> AsyncGenerator[T, None]:
    """What `generate` gives for the source's prompt, which may take two of them; ProcessDied, and its own errors.

    `void` tells that all outputs before it count for nothing; None: nobody can take back what was given.
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
