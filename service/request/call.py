"""Calls the engine for a request of any route. The choices are returned whole or streamed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS, MAX_LOGPROBS, SamplingParams
from mindie_mm.errors import (
    BadReference,
    ContextLengthExceeded,
    FeatureCountMismatch,
    InputError,
    LimitExceeded,
    blaming,
)
from mindie_mm.processes import faults
from mindie_mm.processes.tasks import gather
from mindie_mm.tokenize.prompt import PlannedPrompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.text.detokenizer import StopScope
from mindie_mm.worker.beam_search import BeamSearchSequence, beam_search
from mindie_mm.worker.deltas import Answer, Delta
from mindie_mm.worker.retry import PromptSource
from service.render.plans import KnownMedia
from service.request.message import MessageRules
from service.request.meter import Meter
from service.request.prompts import Made, Parse, PromptReader, prompt_of_ids, prompts, spooled_prompts
from service.request.state import Served, Service
from service.request.token_text import prompt_text
from service.schemas.choices import Choice, Clock, Timed, timings

Add = Callable[[int, Delta], Awaitable[None]]
"""Takes an addition to the output of the choice with an index."""

_log = logging.getLogger(__name__)
_NO_GRAMMAR = re.compile(r"the grammar is not supported: (?:at \d+\(\d+\): )?(.+)")
"""Pattern of an error about a grammar.

For tools, the service itself writes the grammar, so line numbers would mean nothing to the client.
"""

MAX_ANSWER_LOGPROBS = 2**20
"""Maximum number of log-probabilities in one answer. Each of them takes about 500 bytes in all processes together.

If the context is long, one choice may exceed this number, so that every token can have `MAX_LOGPROBS`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """The rules for one output: how it is drawn, and how its text becomes a message."""

    service: Served
    params: SamplingParams
    structure_field: str | None = None
    """Field of the request that describes the structured output."""
    silent: Collection[int] | None = None
    """Ids of the tokens that are left out of the text. If it is None, `params.skip_special_tokens` applies."""
    stop_scope: StopScope | None = None
    """Part of the output in which stop strings have an effect. None means the whole output."""
    message: MessageRules = field(default_factory=MessageRules)
    """Rules for the messages of a chat's answer."""
    reasoning_tokens: int | None = None
    """Maximum number of reasoning tokens."""

    async def check_structure(self) -> None:
        """Raise InputError if the structured output is not supported."""
        with blaming(self.structure_field):
            try:
                await self.service.worker.check_schema(self.params)
            except InputError as error:
                noun = {"tools": "tool", "functions": "function"}.get(self.structure_field or "")
                if noun and (match := _NO_GRAMMAR.match(str(error))):
                    raise InputError(f"the parameters of a {noun} are not supported: {match[1]}") from error
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(OutputRules):
    """One request's call to the engine."""

    service: Service
    n: int
    """Number of choices per prompt."""
    id: str
    """Id of the answer. The id of a choice is this id, a hyphen and the choice's index."""
    fingerprint: str
    """The `system_fingerprint` of the answer."""
    clock: Clock
    timed: bool
    """True if the answer contains timings."""
    meter: Meter
    owner: bytes
    """Digest of the API key that the request carries."""
    length_penalty: float | None = None
    """Length penalty of a beam search with `n` beams. If it is None, tokens are drawn."""
    accepts_handles: bool = False
    """True if token ids of the request may contain handle words."""

    @property
    def model_name(self) -> str:
        """Name of the model in the answer: of the LoRA adapter, or of the served model."""
        return self.params.lora or self.service.model_name

    @asynccontextmanager
    async def prompts(
        self, given: Sequence[Parse], truncate_to: int | None = None, *, field: str | None = None
    ) -> AsyncIterator[list[PromptSource]]:
        """Parse the prompts, limit their length with `Worker.limited`, and tokenize them with `prompts.prompts`.

        Raise InputError if a prompt is not valid, or if the structured output is not supported. `field` is the field
        of the request that contains the prompts, or None if it depends on the route.
        """
        with self.meter.counted(len(given) * self.n), self.service.worker.loras.use(self.params.lora) as key:
            await self.check_structure()
            limited = [partial(self._limited, parse, truncate_to) for parse in given]
            async with prompts(self.service, limited, self.clock, self.owner, field) as sources:
                for source in sources:
                    source.lora = key
                yield sources

    @asynccontextmanager
    async def plans(
        self,
        given: Sequence[Parse],
        *,
        field: str | None = None,
        known_media: KnownMedia | None = None,
        fill: bool = False,
    ) -> AsyncIterator[Made[PlannedPrompt]]:
        """Parse the prompts, limit their length, and plan them without preprocessing their media unless `fill`.

        Items in `known_media` are neither fetched nor planned again.

        Raise InputError in the same cases as `prompts`.
        """
        await self.check_structure()
        limited = [partial(self._limited, parse, None) for parse in given]
        make = partial(self.service.worker.plan, fill=fill)
        async with spooled_prompts(
            self.service, limited, self.clock, self.owner, field, make, known_media, fill=fill
        ) as made:
            yield made

    def _limited(self, parse: Parse, truncate_to: int | None) -> TokenizeRequest:
        return self.service.worker.limited(parse(), self.params, truncate_to)

    @property
    def reader(self) -> PromptReader:
        """Parser of the request's prompts."""
        return PromptReader(self.service.config, self.service.kept, self.owner, self.params.cache_salt)

    @asynccontextmanager
    async def prompts_of_ids(
        self, given: Sequence[Sequence[int]], cut: PromptOptions, *, field: str = "prompt", of_text: Iterable[str] = ()
    ) -> AsyncIterator[list[PromptSource]]:
        """Yield the prompts for token ids that a client sent, truncated as `cut` specifies.

        Args:
            given: Token ids of each prompt.
            cut: Options with the number of tokens to keep.
            field: Field of the request that contains the ids.
            of_text: Fields of the request that need the ids of the whole prompt. With handles, the service does not
                know the ids of all placeholders.

        Raises:
            InputError: An id is not in the vocabulary, a handle cannot be used, the ids have handles although a field
                of `of_text` is set, or the structured output is not supported.

        """
        with self.meter.counted(len(given) * self.n), self.service.worker.loras.use(self.params.lora) as key:
            await self.check_structure()
            has_handles = self.accepts_handles and any(index < 0 for ids in given for index in ids)
            if has_handles and (name := next(iter(of_text), None)):
                raise InputError(f"{name} is not supported with handles in {field}; leave {name} out", param=name)
            kept = [self._cut(ids, cut) for ids in given]
            checked = [prompt_of_ids(self.service, ids, field, accept_handles=self.accepts_handles) for ids in kept]
            sources = [PromptSource(prompt) for prompt in checked]
            for source in sources:
                source.lora = key
            try:
                yield sources
            except (BadReference, FeatureCountMismatch) as error:  # of the client's own handles
                raise InputError(f"a handle of the prompt cannot be used: {error}", param=field) from error

    async def plans_of_ids(
        self, given: Sequence[Sequence[int]], cut: PromptOptions, *, field: str = "prompt"
    ) -> Made[PlannedPrompt]:
        """Return the plans for token ids that a client sent, truncated as `cut` specifies.

        Raises:
            InputError: An id is not in the vocabulary, or the structured output is not supported.
            ContextLengthExceeded: A prompt is too long.

        """
        await self.check_structure()
        worker = self.service.worker
        room, context = worker.prompt_room(self.params), worker.engine.info.max_model_len
        kept = [self._cut(ids, cut) for ids in given]
        if (longest := max(map(len, kept))) > room:
            message = f"the prompt has {longest} tokens; with the output tokens of the request, the limit is {room}"
            with blaming(field):
                raise ContextLengthExceeded.of(context, message)
        plans = [PlannedPrompt(prompt_of_ids(self.service, ids, field).ids) for ids in kept]
        return Made(plans, [[] for _ in plans])

    def _cut(self, ids: Sequence[int], options: PromptOptions) -> Sequence[int]:
        """Return `ids`, truncated to `options.cut_to` tokens."""
        num_kept = self.service.worker.prompt_room(self.params) if options.cut_to == -1 else options.cut_to
        if not 0 < num_kept < len(ids):
            return ids
        return ids[-num_kept:] if options.cut_side == "left" else ids[:num_kept]

    async def choices(self, sources: Sequence[PromptSource]) -> list[Choice]:
        """Wait until all choices are finished, and return them."""
        choices = [Choice(index=index) for index in range(len(sources) * self.n)]

        def discard(index: int) -> None:
            choices[index] = Choice(index=index)

        async def add(index: int, delta: Delta) -> None:
            choices[index].add(delta)

        await self.run(sources, add, discard)
        return choices

    def timings(self, choices: Sequence[Answer]) -> Timed:
        """Return the answer's `timings`, or an empty dict if the request does not ask for them."""
        return {"timings": timings(self.clock, choices)} if self.timed else {}

    async def run(
        self, sources: Sequence[PromptSource], add: Add, discard: Callable[[int], None] | None = None
    ) -> None:
        """Run `n` choices per prompt, and pass each addition to an output to `add`, with the index of the choice.

        The first `n` indices belong to the first prompt, the next `n` to the second, and so on.

        Args:
            sources: Prompts of the request.
            add: Coroutine function that takes an addition. Its calls do not overlap.
            discard: Function to call with the index of a choice whose output starts again, because the weights were
                replaced. None means that such an output fails with WeightsChanged.

        """
        n, lock = self.n, asyncio.Lock()
        self._require_room(sources)
        for source in sources:
            source.share(n)
            if self.service.config.log_prompts:
                text = prompt_text(self.service.worker.tokenizer, source.prompt)
                _log.info("prompt of %d tokens: %s", len(source.prompt), text)
        self.meter.asked([len(source.prompt) for source in sources], self.params, n)

        async def add_alone(index: int, delta: Delta) -> None:
            async with lock:
                await add(index, delta)

        run = partial(self._draw, discard) if self.length_penalty is None else self._search
        firsts = [asyncio.get_running_loop().create_future() for _ in sources]
        await gather([run(sources[i // n], i, firsts[i // n], add_alone) for i in range(len(sources) * n)])

    def _require_room(self, sources: Sequence[PromptSource]) -> None:
        """Raise LimitExceeded or QueueFull if the answer, or all answers together, may have too many log-probabilities.

        A few log-probabilities for each generated token do not count toward the limit of all answers, because
        `max_tokens` is often far above the length of the answer.
        """
        params, info = self.params, self.service.worker.engine.info
        context, num_prompts, num_generated = info.max_model_len, 0, 0
        named = params.logprob_token_ids

        def num_each(num_top: int) -> int:
            return 1 + (info.vocab_size if num_top == ALL_TOKENS else num_top)

        for source in sources:
            num_prompt = len(source.prompt)
            if params.prompt_logprobs is not None:
                num_prompts += self.n * num_prompt * num_each(params.prompt_logprobs)
            if params.logprobs is not None:
                most = params.most_tokens(max(context - num_prompt, 0))
                num_generated += self.n * most * num_each(params.logprobs if named is None else len(named))
        limit = max(MAX_ANSWER_LOGPROBS, context * (MAX_LOGPROBS + 1))
        if (num_logprobs := num_prompts + num_generated) > limit:
            raise LimitExceeded(
                f"the response may have {num_logprobs} log probabilities (choices x tokens x log probabilities per "
                f"token); the limit is {limit}. Lower n, max_tokens or logprobs"
            )
        of_all_tokens = params.logprobs == ALL_TOKENS and named is None
        self.service.admission.hold_logprobs(num_prompts + (num_generated if of_all_tokens else 0))

    async def _draw(
        self,
        discard: Callable[[int], None] | None,
        source: PromptSource,
        index: int,
        prompt_logprobs: asyncio.Future[list[TokenLogprob]],
        add: Add,
    ) -> None:
        """Draw the output of one choice. `run` describes `discard`.

        The first choice of a prompt sets the future `prompt_logprobs`. The prompt's other choices wait for it, because
        their log-probabilities of the prompt are the same.
        """
        with self.meter.choice(index) as meter:
            params, shared = self._seeded(index % self.n), None
            if index % self.n and params.prompt_logprobs is not None:
                shared = await prompt_logprobs
                params = msgspec.structs.replace(params, prompt_logprobs=None)
            begins = True

            def start_again() -> None:
                nonlocal begins
                assert discard is not None
                discard(index)
                meter.restart()
                begins = True

            output = self.service.worker.generate(
                source,
                params,
                f"{self.id}-{index}",
                silent=self.silent,
                stop_scope=self.stop_scope,
                discard=None if discard is None else start_again,
            )
            async with aclosing(output) as deltas:
                async for delta in deltas:
                    if delta.prompt_logprobs is not None and not prompt_logprobs.done():
                        prompt_logprobs.set_result(delta.prompt_logprobs)
                    meter.add(delta)
                    faults.point("first-delta" if begins else "next-delta")
                    has_shared = begins and shared is not None
                    await add(index, replace(delta, prompt_logprobs=shared) if has_shared else delta)
                    begins = False

    async def _search(
        self, source: PromptSource, index: int, found: asyncio.Future[list[BeamSearchSequence]], add: Add
    ) -> None:
        """Find one choice of a beam search. The first choice of a prompt sets the future `found`."""
        with self.meter.choice(index) as meter:
            if index % self.n == 0:
                assert self.length_penalty is not None
                with blaming(self.structure_field):
                    beams = beam_search(
                        self.service.worker,
                        source,
                        self.params,
                        self.n,
                        self.length_penalty,
                        f"{self.id}-{index}",
                        self.silent,
                        self.stop_scope,
                    )
                    found.set_result(await beams)
            one = (await found)[index % self.n]
            delta = Delta(
                text=one.text,
                token_ids=one.tokens,
                logprobs=None if self.params.logprobs is None else one.logprobs,
                cached_tokens=one.cached_tokens,
                finish_reason=one.finish_reason,
                timings=one.timings,
            )
            meter.add(delta)
            await add(index, delta)

    def _seeded(self, index: int) -> SamplingParams:
        """Return the parameters of a prompt's choice `index`. Seeds are consecutive, and wrap around within int64."""
        if self.params.seed is None or not index:
            return self.params
        return msgspec.structs.replace(self.params, seed=(self.params.seed + index + 2**63) % 2**64 - 2**63)
