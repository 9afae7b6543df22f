"""Types of the answers of the OpenAI-compatible endpoints, for mypy and for the OpenAPI description.

Answers are plain dicts. Keys that are not required are present if the request asks for them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from msgspec import Raw
from pydantic import GetPydanticSchema
from typing_extensions import TypedDict

from mindie_mm.engine.requests.engine_messages import FinishReason
from service.schemas.choices import SpanEntry, Timed, Usage, Used


def _json_of(kind: Any) -> GetPydanticSchema:
    """Return an annotation for encoded JSON, which gives the type of its content."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


class Head(TypedDict):
    """Fields at the start of every answer and chunk."""

    id: str
    created: int
    """Unix time of the request."""
    model: str


class Spanned(TypedDict):
    """Part of a chat's answer, or of its first chunk, if the request sets `media_spans`."""

    media_spans: NotRequired[list[SpanEntry]]


class End(TypedDict):
    """Reasons for the end of a choice. Both are None until it ends."""

    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or the token id from `stop_token_ids` that ended the choice, otherwise None."""


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
    """Present in a choice's first chunk."""
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
    """A response of /v1/completions, or one event of a streamed response."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
