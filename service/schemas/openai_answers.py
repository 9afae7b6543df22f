"""Answers of the OpenAI-compatible endpoints, as the interface's description tells them and mypy holds them to be.

Plain dicts. Keys that are not required are there where the request asks for them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from msgspec import Raw
from pydantic import GetPydanticSchema
from typing_extensions import TypedDict

from mindie_mm.engine.requests.engine_messages import FinishReason
from service.schemas.choices import SpanEntry, Timed, Usage, Used


def _json_of(kind: Any) -> GetPydanticSchema:
    """Of JSON that is written already: what it holds."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


class Head(TypedDict):
    """How every answer and chunk begins."""

    id: str
    created: int
    """Unix time."""
    model: str


class Spanned(TypedDict):
    """What a chat's answer, or its first chunk, has where `media_spans` asks for it."""

    media_spans: NotRequired[list[SpanEntry]]


class End(TypedDict):
    """What ended a choice: None while it goes on."""

    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string, or the id of `stop_token_ids`."""


class ChatToken(TypedDict):
    """A token."""

    token: Annotated[Raw, _json_of(str)]
    logprob: float
    bytes: Annotated[Raw, _json_of(list[int])]


class ChatPosition(ChatToken):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    """Of a chat's choice, or of a part of one."""

    content: Annotated[Raw, _json_of(list[ChatPosition])]


class ChatMessage(TypedDict):
    """The answer's text."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(End):
    """One of `n`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Head, Timed, Spanned):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict):
    """What a choice grew by."""

    role: NotRequired[Literal["assistant"]]
    """With the first."""
    content: str


class ChatChunkChoice(End):
    """What one choice grew by."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Head, Used, Timed, Spanned):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionLogprobs(TypedDict):
    """Of a choice, or of a part of one: lists of one length. The first token of an echoed prompt has none."""

    tokens: Annotated[Raw, _json_of(list[str])]
    token_logprobs: Annotated[Raw, _json_of(list[float | None])]
    top_logprobs: Annotated[Raw, _json_of(list[dict[str, float] | None])]
    text_offset: list[int]


class CompletionChoice(End):
    """One of `n` for each prompt, or what one grew by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Head, Used, Timed):
    """The answer of /v1/completions, and an event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
