"""POST /v1/completions. Texts may contain images in the format of text-generation-webui."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Item
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.deltas import Delta
from mindie_mm.worker.retry import PromptSource
from service.request.admitted import DONE, SendEvent
from service.request.incoming import IncomingDep, Responder
from service.request.text_logprobs import LogprobsBuffer
from service.request.token_text import TextOffsets, TokensAsIds, completion_logprobs, prompt_logprobs
from service.schemas.choices import Choice, Used, usage
from service.schemas.description import streamed
from service.schemas.openai_answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Prompted,
    Scored,
    Tokened,
)
from service.schemas.openai_types import MAX_CHOICES, CompletionBody

router = APIRouter()

_OF_TEXT = ("echo", "return_token_ids", "truncate_prompt_tokens")
"""Fields that are not supported for prompts with handles."""


@router.post("/v1/completions", responses=streamed(Completion, whole=Completion, last=DONE))
async def completions(body: CompletionBody, incoming: IncomingDep) -> Response:
    """Complete texts or token ids. Stream the completion on request."""
    body = body.with_defaults(incoming.service.config)
    call = incoming.call(body, body, prefix="cmpl-", n=body.n or 1, length_penalty=body.beam_length_penalty)
    return incoming.answered(_Completion(call, body, int(time.time())), stream=body.stream)


class _Asked(Prompted, Scored, Tokened):
    """Fields of a choice that are null in a whole answer unless the request asks for them."""


@dataclass(frozen=True, slots=True)
class _Written:
    """The log-probabilities of a choice that is being streamed or assembled."""

    offsets: TextOffsets
    buffer: LogprobsBuffer


@dataclass(frozen=True, slots=True)
class _Completion(Responder):
    body: CompletionBody
    created: int

    @asynccontextmanager
    async def sources(self) -> AsyncIterator[list[PromptSource]]:
        """Yield the prompts, and free the shared memory of their images and embeddings at exit.

        Raise InputError if a prompt is empty, and LimitExceeded if the request asks for too many choices.
        """
        given, embeddings = self.body.prompts(), self.body.embeddings()
        if (not given and not embeddings) or not all(given):
            raise InputError("prompt is empty", param="prompt")
        if not all(embeddings):
            raise InputError("prompt_embeds is empty", param="prompt_embeds")
        n, num_prompts = self.call.n, len(embeddings) + len(given)
        if num_prompts * n > MAX_CHOICES:
            message = (
                f"the request has {num_prompts} prompts with {n} choices each; the limit is {MAX_CHOICES} choices "
                "in total"
            )
            raise LimitExceeded(message, param="prompt")
        options = replace(
            self.body.prompt_options,
            add_special_tokens=self.body.add_special_tokens is not False,
            parse_special=self.body.parse_special,
        )
        reader = self.call.reader
        texts = [text for text in given if isinstance(text, str)]
        read = [
            *(partial(reader.items, [{"prompt_embeds": one}]) for one in embeddings),
            *(partial(reader.text, text) for text in texts),
        ]

        def request(read: Callable[[], list[Item]]) -> TokenizeRequest:
            return TokenizeRequest(items=read(), chat=False, options=options)

        parse = [partial(request, one) for one in read]
        ids = [ids for ids in given if not isinstance(ids, str)]
        of_text = [name for name in _OF_TEXT if getattr(self.body, name)]
        async with AsyncExitStack() as stack:
            field = None if texts else "prompt_embeds"
            sources = await stack.enter_async_context(self.call.prompts(parse, field=field)) if parse else []
            if ids:
                prompts = self.call.prompts_of_ids(ids, options, of_text=of_text)
                sources = [*sources, *await stack.enter_async_context(prompts)]
            yield sources

    async def answer(self) -> Completion:
        async with self.sources() as sources:
            choices = await self.call.choices(sources)
        prompts, echoes = [source.prompt for source in sources], self._echoes(sources)
        answered = [
            await self._choice(choice, prompts[(index := choice.index // self.call.n)], echoes[index])
            for choice in choices
        ]
        unasked: _Asked = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
        return {
            **self._part([{**unasked, **choice} for choice in answered]),
            "usage": usage(prompts, choices),
            **self.call.timings(choices),
        }

    async def stream(self, send: SendEvent) -> None:
        """Send the chunks of the answer. The last chunk has the usage and the timings, if they are requested."""
        async with self.sources() as sources:
            prompts, echoes = [source.prompt for source in sources], self._echoes(sources)
            choices = [Choice(index=index) for index in range(len(prompts) * self.call.n)]
            written = [self._written() for _ in choices]

            async def add(index: int, delta: Delta) -> None:
                part = Choice(index=index)
                part.add(delta)
                at = index // self.call.n
                first = not choices[index].texts
                prompt, echo = (prompts[at], echoes[at]) if first else (None, "")
                chunk = await self._choice(part, prompt, echo, written[index])
                choices[index].add(delta)
                logprobs = chunk["logprobs"]
                has_news = chunk["text"] or (logprobs and logprobs["text_offset"]) or chunk.get("token_ids")
                if has_news or delta.finish_reason:
                    so_far: Used = {"usage": usage(prompts, choices)} if self.body.continuous_usage else {}
                    send({**self._part([chunk]), **so_far})

            await self.call.run(sources, add)
        used: Used = {"usage": usage(prompts, choices)} if self.body.include_usage else {}
        timed = self.call.timings(choices)
        if used or timed:
            send({**self._part([]), **used, **timed})

    def _part(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.call.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.call.model_name,
            "system_fingerprint": self.call.fingerprint,
            "choices": choices,
        }

    def _written(self) -> _Written:
        tokenizer = self.call.service.worker.tokenizer
        return _Written(TextOffsets(tokenizer, self.call.params), LogprobsBuffer(tokenizer, self.call.params))

    def _echoes(self, sources: Sequence[PromptSource]) -> list[str]:
        """Return the text to echo for each prompt: the text that the caller sent, or the text of the ids."""
        if not self.body.echo:
            return [""] * len(sources)
        decode = self.call.service.worker.tokenizer.decode
        return [
            given
            if isinstance(given, str) and not source.prompt.spans  # images in text are echoed as placeholders
            else decode(source.prompt.plain_ids.tolist(), skip_special_tokens=False)
            for given, source in zip(self.body.prompts(), sources, strict=True)
        ]

    async def _choice(
        self, choice: Choice, prompt: Prompt | None, echo: str, written: _Written | None = None
    ) -> CompletionChoice:
        """Return a whole choice or its next part, preceded by `echo`. `prompt` is None if the part is not the first."""
        echoed = prompt.plain_ids.tolist() if prompt is not None and self.body.echo else []
        logprobs: CompletionLogprobs | None = None
        if self.body.logprobs is not None:
            written = written or self._written()
            released = await written.buffer.push(choice)
            positions: list[tuple[int, TokenLogprob | None]] = [(token, None) for token in echoed[:1]]
            scored = [_topped(p, self.body.logprobs) for p in choice.prompt_logprobs] if echoed else []
            positions += [(p.token_id, p) for p in (*scored, *released.logprobs)]
            starts = await written.offsets.echoed(echoed, echo)
            starts += await written.offsets.answered([p.token_id for p in released.logprobs])
            texts = self.call.service.tokens
            texts = TokensAsIds(texts) if self.body.return_tokens_as_token_ids else texts
            logprobs = await completion_logprobs(texts, positions, starts, released.cut)
        entry: CompletionChoice = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            entry["token_ids"] = choice.token_ids
            if prompt is not None:
                entry["prompt_token_ids"] = prompt.plain_ids.tolist()
        if (num_top := self.body.prompt_logprobs) is not None:
            tokens = self.call.service.tokens
            entry["prompt_logprobs"] = await prompt_logprobs(tokens, choice.prompt_logprobs, num_top)
        return entry


def _topped(one: TokenLogprob, num_top: int) -> TokenLogprob:
    """Return `one` with only the `num_top` most likely tokens. `one` has more if `prompt_logprobs` is larger."""
    return one if not 0 <= num_top < len(one.top) else msgspec.structs.replace(one, top=one.top[:num_top])
