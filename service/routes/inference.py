"""POST /inference/v1/generate, vLLM's endpoint for prompts that /render has made."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter
from msgspec import Raw
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.engine.requests.engine_messages import FinishReason, TokenLogprob
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS
from mindie_mm.errors import blaming
from mindie_mm.tokenize.prompt import Prompt, PromptOptions
from mindie_mm.worker.deltas import Delta
from mindie_mm.worker.retry import PromptSource
from service.render.answer import PlaceholderRange
from service.render.token_body import TokenBody, request_of
from service.request.admitted import DONE, SendEvent
from service.request.incoming import IncomingDep, Responder
from service.request.prompts import prompt_of_ids
from service.request.token_text import chat_logprobs, finite, prompt_logprobs
from service.routes.render import require_scale_out
from service.schemas.choices import Choice, Usage, usage
from service.schemas.description import streamed
from service.schemas.openai_answers import ChatLogprobs, PromptToken, json_of

router = APIRouter()


class ScoredToken(TypedDict):
    """A token and its log-probability."""

    token_id: int
    logprob: float
    rank: int | None
    """Rank of the token by its probability, from 1. None if it is not among the reported tokens."""


class ScoredPosition(ScoredToken):
    """A token of the answer, and the most likely tokens at its position. The token itself is the first of them."""

    top_logprobs: list[ScoredToken]


class TokenLogprobs(TypedDict):
    """Log-probabilities of a choice."""

    content: list[ScoredPosition]


class TokenChoice(TypedDict):
    """A choice, or a part of a streamed one."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int]
    routed_experts: None
    sampling_mask: None
    weight_versions: None
    logprobs: TokenLogprobs | ChatLogprobs | None
    text: NotRequired[str]
    """Only if `output_mode` is text."""


class TokenPrompt(TypedDict):
    """The prompt, or None unless the request sets `return_token_ids`."""

    prompt_token_ids: NotRequired[list[int] | None]
    mm_placeholders: NotRequired[dict[str, list[PlaceholderRange]] | None]


class TokenAnswer(TokenPrompt):
    """The response of /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: Annotated[Raw, json_of(list[dict[str, PromptToken] | None])] | None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None
    output_mode: Literal["tokens", "text"]
    choices: list[TokenChoice]


class TokenChunk(TokenPrompt):
    """An event of a streamed response. The first event of each prompt has the prompt."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokenChoice]
    usage: Usage | None
    """The usage so far, if the request asks for it. The last event with the whole usage has no choices."""


@router.post("/inference/v1/generate", responses=streamed(TokenChunk, whole=TokenAnswer, last=DONE))
async def generate_tokens(body: TokenBody, incoming: IncomingDep) -> Response:
    """Continue the token ids of a prompt, whose media are preprocessed tensors."""
    require_scale_out(incoming)
    call = incoming.call(body, body, prefix="generate-tokens-", n=body.drawing.n or 1)
    return incoming.answered(_Tokens(call, body, int(time.time())), stream=body.stream)


@dataclass(frozen=True, slots=True)
class _Tokens(Responder):
    body: TokenBody
    created: int

    @asynccontextmanager
    async def sources(self) -> AsyncIterator[list[PromptSource]]:
        """Yield the prompt, and free the shared memory of its media at exit. Raise InputError if it is not valid."""
        ids = self.body.token_ids
        prompt_of_ids(self.call.service, ids, "token_ids")  # the tokenizer does not know the size of the vocabulary
        with blaming("features"):
            items = self.body.items()
        prompts = (
            self.call.prompts([partial(request_of, ids, items)], field="features")
            if items
            else self.call.prompts_of_ids([ids], PromptOptions(), field="token_ids")
        )
        async with prompts as sources:
            yield sources

    async def answer(self) -> TokenAnswer:
        async with self.sources() as sources:
            choices = await self.call.choices(sources)
            prompts = [source.prompt for source in sources]
        scored = None
        if (num_top := self.call.params.prompt_logprobs) is not None:
            scored = await prompt_logprobs(self.call.service.tokens, choices[0].prompt_logprobs, num_top)
        return {
            "request_id": self._id,
            "model": self.call.model_name,
            "created": self.created,
            "usage": usage(prompts, choices),
            "prompt_logprobs": scored,
            **self._prompt(prompts[0]),
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.body.output_mode,
            "choices": [await self._choice(choice) for choice in choices],
        }

    async def stream(self, send: SendEvent) -> None:
        """Send the parts of the choices, and the usage if it is requested."""
        options = self.body.stream_options
        ends_with_usage = options is not None and bool(options.include_usage)
        is_counted = ends_with_usage and options is not None and bool(options.continuous_usage_stats)
        async with self.sources() as sources:
            prompts = [source.prompt for source in sources]
            choices = [Choice(index=index) for index in range(self.call.n)]
            first = self._prompt(prompts[0]) if self.body.return_token_ids else {}

            async def add(index: int, delta: Delta) -> None:
                nonlocal first
                choices[index].add(delta)
                if not (delta.token_ids or delta.text or delta.finish_reason):
                    return
                part = Choice(index=index)
                part.add(delta)
                used = usage(prompts, [choices[index]]) if is_counted else None
                send({**self._chunk([await self._choice(part)], used), **first})
                first = {}

            await self.call.run(sources, add)
        if ends_with_usage:
            send(self._chunk([], usage(prompts, choices)))

    def _chunk(self, choices: list[TokenChoice], used: Usage | None) -> TokenChunk:
        return {"request_id": self._id, "output_mode": self.body.output_mode, "choices": choices, "usage": used}

    @property
    def _id(self) -> str:
        own = self.body.request_id
        return self.call.id if own is None else f"generate-tokens-{own}"

    def _prompt(self, prompt: Prompt) -> TokenPrompt:
        if not self.body.return_token_ids:
            return {"prompt_token_ids": None, "mm_placeholders": None}
        ranges: dict[str, list[PlaceholderRange]] = {}
        for item in self.body.items():
            ranges.setdefault(item.kind, []).append({"offset": item.start, "length": item.stop - item.start})
        return {"prompt_token_ids": prompt.plain_ids.tolist(), "mm_placeholders": ranges or None}

    async def _choice(self, choice: Choice) -> TokenChoice:
        is_text, params = self.body.output_mode == "text", self.call.params
        logprobs: TokenLogprobs | ChatLogprobs | None = None
        if params.logprobs is not None and is_text:
            named = params.logprob_token_ids is not None
            logprobs = await chat_logprobs(self.call.service.tokens, choice.logprobs, named=named)
        elif params.logprobs is not None:
            logprobs = {"content": _positions(choice.logprobs, params.logprobs)}
        entry: TokenChoice = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": logprobs,
        }
        if is_text:
            entry["text"] = choice.text
        return entry


def _positions(logprobs: Sequence[TokenLogprob], num_top: int) -> list[ScoredPosition]:
    """Return the log-probabilities in vLLM's order: the drawn token, and then the most likely tokens."""
    positions: list[ScoredPosition] = []
    for one in logprobs:
        ranks = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
        scores = {one.token_id: one.logprob} | dict(one.top)
        most = len(scores) if num_top == ALL_TOKENS else max(num_top, 1)
        tops = [_scored(token, logprob, ranks.get(token)) for token, logprob in [*scores.items()][:most]]
        positions.append({**_scored(one.token_id, one.logprob, ranks.get(one.token_id)), "top_logprobs": tops})
    return positions


def _scored(token: int, logprob: float, rank: int | None) -> ScoredToken:
    return {"token_id": token, "logprob": finite(logprob), "rank": rank}
