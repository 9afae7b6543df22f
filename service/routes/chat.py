"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from fastapi import APIRouter
from starlette.responses import Response

from mindie_mm.processes import faults
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.worker import Delta
from service.request.incoming import Form, IncomingDep
from service.request.prompt_logprobs import prompt_logprobs
from service.request.sse import DONE
from service.request.text_logprobs import LogprobsBuffer
from service.request.token_text import TokensAsIds, chat_logprobs
from service.schemas.choices import Choice, Used, media_spans, usage
from service.schemas.description import streamed
from service.schemas.openai_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Prompted,
    Scored,
    Spanned,
    Tokened,
)
from service.schemas.openai_types import ChatBody

router = APIRouter()


@router.post("/v1/chat/completions", responses=streamed(ChatCompletionChunk, whole=ChatCompletion, last=DONE))
async def chat_completions(body: ChatBody, incoming: IncomingDep) -> Response:
    """Answers a chat, with images and videos in it; streamed on request."""
    call = incoming.call(body.model, body, prefix="chatcmpl-", n=body.n or 1)
    return incoming.answered(_Chat(call, body, int(time.time())), stream=body.stream)


@dataclass(frozen=True, slots=True)
class _Chat(Form):
    """One chat request."""

    body: ChatBody
    created: int

    def request(self) -> TokenizeRequest:
        """Return the request for the tokenizers. Raise InputError for invalid tools or template variables."""
        return TokenizeRequest(
            messages=self.body.messages,
            add_generation_prompt=self.body.opens_turn,
            continue_final_message=bool(self.body.continue_final_message),
            chat_template_kwargs=self.body.template_kwargs(),
            options=replace(self.body.prompt_options, repeat_special_tokens=bool(self.body.add_special_tokens)),
        )

    async def answer(self) -> ChatCompletion:
        async with self.call.prompts([self.request()]) as (source,):
            choices = await self.call.choices([source])
        faults.point("answered")
        return {
            "id": self.call.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.call.service.model_name,
            "system_fingerprint": self.call.service.fingerprint,
            "choices": [await self._choice(choice) for choice in choices],
            "usage": usage([source.prompt], choices),
            **self.call.timings(choices),
            **self._spans(source.prompt),
            **self._prompted(source.prompt),
            **await self._scored(choices[0]),
        }

    async def events(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield the answer's chunks: a first one per choice, then its text, then the usage if requested."""
        choices = [Choice(index=index) for index in range(self.call.n)]
        buffers = [self._logprobs_buffer() for _ in choices]
        async with (
            self.call.prompts([self.request()]) as (source,),
            aclosing(self.call.deltas([source])) as deltas,
        ):
            spans = self._spans(source.prompt)
            async for index, delta in deltas:
                first = not choices[index].texts
                choices[index].add(delta)
                if first:
                    so_far = self._so_far(source.prompt, choices, len(delta.token_ids))
                    head = _first(index, self.body.role)
                    yield {**self._chunk([head]), **spans, **self._prompted(source.prompt), **so_far}
                    spans = {}  # only the first chunk has them
                    if echoed := self.body.echoed:
                        yield {**self._chunk([{**head, "delta": {"content": echoed}}]), **so_far}
                chunk = await self._delta(index, delta, buffers[index])
                if delta.text or chunk["logprobs"] or chunk.get("token_ids") or delta.finish_reason:
                    yield {**self._chunk([chunk]), **self._so_far(source.prompt, choices)}
        used: Used = {"usage": usage([source.prompt], choices)} if self.body.include_usage else {}
        timed = self.call.timings(choices)
        if used or timed:
            yield {**self._chunk([]), **used, **timed}

    def _so_far(self, prompt: Prompt, choices: Sequence[Choice], num_untold: int = 0) -> Used:
        """Return the usage so far, if the request wants it in every chunk. `num_untold` is as in `usage`."""
        return {"usage": usage([prompt], choices, num_untold)} if self.body.continuous_usage else {}

    def _spans(self, prompt: Prompt) -> Spanned:
        return {"media_spans": media_spans(prompt)} if self.body.media_spans else {}

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.call.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.call.service.model_name,
            "system_fingerprint": self.call.service.fingerprint,
            "choices": choices,
        }

    async def _choice(self, choice: Choice) -> ChatChoice:
        return {
            "index": choice.index,
            "message": {"role": self.body.role, "content": self.body.echoed + choice.text, "refusal": None},
            "logprobs": await self._logprobs(choice, self._logprobs_buffer()) if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._tokened(choice),
        }

    async def _delta(self, index: int, delta: Delta, buffer: LogprobsBuffer) -> ChatChunkChoice:
        return {
            "index": index,
            "delta": {"content": delta.text},
            "logprobs": await self._logprobs(delta, buffer) if self.body.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._tokened(delta),
        }

    def _prompted(self, prompt: Prompt) -> Prompted:
        return {"prompt_token_ids": prompt.plain_ids.tolist()} if self.body.return_token_ids else {}

    def _tokened(self, part: Delta | Choice) -> Tokened:
        return {"token_ids": part.token_ids} if self.body.return_token_ids else {}

    async def _scored(self, choice: Choice) -> Scored:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": await prompt_logprobs(self.call.service.tokens, choice.prompt_logprobs, num_top)}

    def _logprobs_buffer(self) -> LogprobsBuffer:
        return LogprobsBuffer(self.call.service.worker.tokenizer, self.call.params)

    async def _logprobs(self, part: Delta | Choice, buffer: LogprobsBuffer) -> ChatLogprobs | None:
        """Return the log-probabilities to send with a choice, or with its next part. None if a part has none."""
        released = await buffer.push(part)
        if not released.logprobs and isinstance(part, Delta):
            return None
        texts = self.call.service.tokens
        return await chat_logprobs(
            TokensAsIds(texts) if self.body.return_tokens_as_token_ids else texts,
            released.logprobs,
            released.cut,
            named=self.body.logprob_token_ids is not None,
        )


def _first(index: int, role: str) -> ChatChunkChoice:
    """Return the content of a choice's first chunk, which is its role."""
    return {
        "index": index,
        "delta": {"role": role, "content": ""},
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
