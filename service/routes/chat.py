"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter
from msgspec import Raw
from starlette.responses import Response

from mindie_mm.inputs import media_defaults
from mindie_mm.processes import faults
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.deltas import Delta
from mindie_mm.worker.retry import PromptSource
from service.request.admitted import DONE, SendEvent
from service.request.chat_call import after_prompt, chat_call
from service.request.incoming import Incoming, IncomingDep, Responder
from service.request.message import MessageParts, MessageReader, MessageRules, ReasoningCount, delta_of, is_whole
from service.request.prompts import Parse
from service.request.stored_files import with_stored_files
from service.request.text_logprobs import LogprobsBuffer
from service.request.token_text import TokensAsIds, chat_logprobs, in_turns, prompt_logprobs
from service.schemas.choices import Choice, Usage, Used, media_spans, usage
from service.schemas.description import streamed
from service.schemas.openai_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Prompted,
    Spanned,
    Tokened,
)
from service.schemas.openai_types import ChatBody
from service.schemas.tool_types import ToolUse

router = APIRouter()


@router.post("/v1/chat/completions", responses=streamed(ChatCompletionChunk, whole=ChatCompletion, last=DONE))
async def chat_completions(body: ChatBody, incoming: IncomingDep) -> Response:
    """Answer a chat, which may contain images, videos and audio. Stream the answer on request."""
    body = body.model_copy(update={"messages": await with_stored_files(body.messages, incoming)})
    return incoming.answered(chat_of(body, incoming), stream=body.stream)


def chat_of(body: ChatBody, incoming: Incoming, *, prefix: str = "chatcmpl-", cut_max_tokens: bool = False) -> Chat:
    """Return the responder for a chat.

    Args:
        body: Body of a chat completion. Other endpoints that answer chats translate their bodies into it.
        incoming: The request.
        prefix: Text in front of the request's id in the answer's id.
        cut_max_tokens: Whether to reduce `max_tokens` to the room in the model's context. If not, a request that does
            not fit is refused.

    Raises:
        ModelNotFound: The model is not the served model.
        InputError: A field is not valid.

    """
    body = body.with_defaults(incoming.service.config)
    use = body.tool_use(body.parallel_tool_calls)
    call = incoming.call(body, body, prefix=prefix, n=body.n or 1, length_penalty=body.beam_length_penalty)
    if cut_max_tokens:
        call = replace(call, params=msgspec.structs.replace(call.params, cut_max_tokens=True))
    budget = body.thinking_token_budget
    call = chat_call(
        call,
        use,
        body.messages,
        include_reasoning=body.include_reasoning is not False,
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        reasoning_tokens=None if budget == -1 else budget,
    )
    return Chat(call, body, int(time.time()), use)


@dataclass(frozen=True, slots=True)
class Chat(Responder):
    """A chat, and its answer as a chat completion."""

    body: ChatBody
    created: int
    """Unix time of the request."""
    use: ToolUse

    def parse(self) -> Parse:
        """Return the function that parses the chat. Raise InputError if a template variable is not valid."""
        messages, variables = self.call.service.chat_dialect.request(
            self.body.messages, self.use, self.body.chat_template_kwargs, self.body.reasoning_effort
        )
        defaults = media_defaults(self.body.mm_processor_kwargs, self.body.media_io_kwargs)
        return lambda: TokenizeRequest(
            messages=self.call.reader.messages(messages, defaults),
            add_generation_prompt=self.body.opens_turn,
            continue_final_message=bool(self.body.continue_final_message),
            chat_template_kwargs=variables,
            options=replace(
                self.body.prompt_options,
                parse_special=self.body.parse_special,
                repeat_special_tokens=bool(self.body.add_special_tokens),
            ),
        )

    async def answer(self) -> ChatCompletion:
        """Return the chat completion."""
        async with self.call.prompts([self.parse()], field="messages") as (source,):
            chat = replace(self, call=await after_prompt(self.call, source.prompt))
            choices = await chat.call.choices([source])
        faults.point("answered")
        return await chat.completion(source.prompt, choices)

    async def completion(self, prompt: Prompt, choices: Sequence[Choice]) -> ChatCompletion:
        """Return the chat completion with the given choices."""
        counts = [self._count() for _ in choices]
        if self.call.message.reasoning:
            for choice, count in zip(choices, counts, strict=True):
                async for token_ids in in_turns(choice.token_ids, 4):
                    count.push(token_ids)
        return {
            "id": self.call.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.call.model_name,
            "system_fingerprint": self.call.fingerprint,
            "choices": [await self._choice(choice) for choice in choices],
            "usage": usage([prompt], choices, num_reasoning=self._num_reasoning(counts)),
            **self.call.timings(choices),
            **self._spans(prompt),
            "prompt_token_ids": self._prompt_ids(prompt),
            "prompt_logprobs": await self._prompt_logprobs(choices[0]),
        }

    async def stream(self, send: SendEvent) -> None:
        """Send the chunks of the answer.

        The first chunk of a choice has the role, and the following chunks have the text. The last chunk of the answer
        has the usage and the timings, if the request asks for them.
        """
        async with self.call.prompts([self.parse()], field="messages") as (source,):
            chat = replace(self, call=await after_prompt(self.call, source.prompt))
            await chat.send_choices(source, send)

    async def send_choices(self, source: PromptSource, send: SendEvent) -> None:
        """Send the chunks of the answer to a tokenized prompt."""
        choices = [Choice(index=index) for index in range(self.call.n)]
        buffers = [self._logprobs_buffer() for _ in choices]
        rules = self.call.message
        streams = [_Stream(rules, self._count()) for _ in choices]
        spans = self._spans(source.prompt)
        ids = self._prompt_ids(source.prompt)
        prompted: Prompted = {} if ids is None else {"prompt_token_ids": ids}

        async def add(index: int, delta: Delta) -> None:
            nonlocal spans, prompted
            first = not choices[index].texts
            choices[index].add(delta)
            if first:
                so_far = self._so_far(source.prompt, choices, streams, len(delta.token_ids))
                head = _part(index, rules.delta({"role": self.body.role, "content": ""}))
                send({**self._chunk([head]), **spans, **prompted, **so_far})
                spans, prompted = {}, {}  # only the first chunk of the answer has these fields
                if echoed := self.body.echoed:
                    send({**self._chunk([_part(index, rules.delta({"content": echoed}))]), **so_far})
            logprobs = await self._logprobs(delta, buffers[index]) if self.body.logprobs else None
            for chunk in streams[index].chunks(index, delta, logprobs, self._tokened(delta)):
                send({**self._chunk([chunk]), **self._so_far(source.prompt, choices, streams)})

        await self.call.run([source], add)
        used: Used = {"usage": self._usage(source.prompt, choices, streams)} if self.body.include_usage else {}
        timed = self.call.timings(choices)
        if used or timed:
            send({**self._chunk([]), **used, **timed})

    def _so_far(
        self, prompt: Prompt, choices: Sequence[Choice], streams: Sequence[_Stream], num_untold: int = 0
    ) -> Used:
        """Return the usage so far if the request asks for it in every chunk.

        `num_untold` has the same meaning as in `usage`.
        """
        return {"usage": self._usage(prompt, choices, streams, num_untold)} if self.body.continuous_usage else {}

    def _usage(
        self, prompt: Prompt, choices: Sequence[Choice], streams: Sequence[_Stream], num_untold: int = 0
    ) -> Usage:
        return usage([prompt], choices, num_untold, self._num_reasoning([stream.count for stream in streams]))

    def _num_reasoning(self, counts: Sequence[ReasoningCount]) -> int | None:
        """Return the number of reasoning tokens, or None if the checkpoint does not write reasoning."""
        return sum(count.num_tokens for count in counts) if self.call.message.reasoning else None

    def _count(self) -> ReasoningCount:
        return ReasoningCount(self.call.service.worker.tokenizer, self.call.message, self.call.silent)

    def _spans(self, prompt: Prompt) -> Spanned:
        return {"media_spans": media_spans(prompt)} if self.body.media_spans else {}

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.call.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.call.model_name,
            "system_fingerprint": self.call.fingerprint,
            "choices": choices,
        }

    async def _choice(self, choice: Choice) -> ChatChoice:
        rules = self.call.message
        parts = MessageParts.of(choice, rules)
        return {
            "index": choice.index,
            "message": self._message(parts),
            "logprobs": await self._logprobs(choice, self._logprobs_buffer()) if self.body.logprobs else None,
            "finish_reason": parts.finish_reason(choice.finish_reason, rules),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self.body.return_token_ids else None,
        }

    def _message(self, parts: MessageParts) -> ChatMessage:
        message = parts.message(self.call.message)
        message["role"] = self.body.role
        if echoed := self.body.echoed:
            message["content"] = echoed + (message["content"] or "")
        return message

    def _prompt_ids(self, prompt: Prompt) -> list[int] | None:
        return prompt.plain_ids.tolist() if self.body.return_token_ids else None

    def _tokened(self, part: Delta) -> Tokened:
        return {"token_ids": part.token_ids} if self.body.return_token_ids else {}

    async def _prompt_logprobs(self, choice: Choice) -> Raw | None:
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return None
        return await prompt_logprobs(self.call.service.tokens, choice.prompt_logprobs, num_top)

    def _logprobs_buffer(self) -> LogprobsBuffer:
        return LogprobsBuffer(self.call.service.worker.tokenizer, self.call.params, self.call.silent)

    async def _logprobs(self, part: Delta | Choice, buffer: LogprobsBuffer) -> ChatLogprobs | None:
        """Return the log-probabilities to send with a choice or with a delta. Return None if a delta has none."""
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


class _Stream:
    """The chunks of one streamed choice."""

    def __init__(self, rules: MessageRules, count: ReasoningCount) -> None:
        self.rules = rules
        self.count = count
        """Counter of the reasoning tokens so far."""
        self._reader = MessageReader(rules)
        self._parts = MessageParts()

    def chunks(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None, tokened: Tokened
    ) -> list[ChatChunkChoice]:
        """Return the chunks for the next delta of choice `index`. Only the first has logprobs and tokens."""
        self.count.push(delta.token_ids)
        deltas: list[ChatDelta]
        has_tokens = bool(logprobs or tokened.get("token_ids"))
        if self.rules.is_plain:
            deltas = [{"content": delta.text}] if delta.text or has_tokens or delta.finish_reason else []
        else:
            parts = self._reader.push(delta.text)
            if delta.finish_reason:
                parts += self._reader.finish(whole=is_whole(delta), by_token=isinstance(delta.stop_reason, int))
            self._parts.add(parts)
            deltas = [content for part in parts if (content := delta_of(part, self.rules)) is not None]
            if delta.finish_reason or (has_tokens and not deltas):
                deltas.append({})
        chunks: list[ChatChunkChoice] = [_part(index, self.rules.delta(content)) for content in deltas]
        if chunks:
            chunks[0] = {**chunks[0], "logprobs": logprobs, **tokened}
            if delta.finish_reason:
                chunks[-1]["finish_reason"] = self._parts.finish_reason(delta.finish_reason, self.rules)
                chunks[-1]["stop_reason"] = delta.stop_reason
        return chunks


def _part(index: int, delta: ChatDelta) -> ChatChunkChoice:
    """Return the part of a chunk about a choice that has not ended."""
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
