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
    system_fingerprint: str
    """Hash of the checkpoint, the software and the settings that may change an answer."""


class Prompted(TypedDict):
    """The prompt's tokens, if the request sets `return_token_ids`. In a stream, only the first chunk has them."""

    prompt_token_ids: NotRequired[list[int]]


class Tokened(TypedDict):
    """The tokens of a choice, or of a part of one, if the request sets `return_token_ids`."""

    token_ids: NotRequired[list[int]]


class PromptToken(TypedDict):
    """A token of a prompt, or a likely one in its place."""

    logprob: float
    rank: int | None
    """Rank among all tokens, from 1 on."""
    decoded_token: str


class Scored(TypedDict):
    """Log-probabilities of the prompt, if the request sets `prompt_logprobs`."""

    prompt_logprobs: NotRequired[Annotated[Raw, _json_of(list[dict[str, PromptToken] | None])]]
    """One entry per token, by token id. The first token has none."""


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

    top_logprobs: Annotated[list[ChatToken] | Raw, _json_of(list[ChatToken])]


class ChatLogprobs(TypedDict):
    """Of a chat's choice, or of a part of one."""

    content: Annotated[Raw, _json_of(list[ChatPosition])]


class CalledFunction(TypedDict):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON object, as the model wrote it."""


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The answer's text and calls."""

    role: str
    """`assistant`, or the role of the last message if `add_generation_prompt` is false."""
    content: str | None
    """None if there are calls and no text beside them."""
    refusal: None
    reasoning_content: NotRequired[str | None]
    """Reasoning before the answer. Present if the checkpoint reasons."""
    reasoning: NotRequired[str | None]
    """The same."""
    tool_calls: NotRequired[list[ToolCall]]
    """Present if the model calls a tool."""
    function_call: NotRequired[CalledFunction]
    """Present in its place if the request has `functions`."""


ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class ChatEnd(TypedDict):
    """Reasons for the end of a chat's choice. Both are None until it ends."""

    finish_reason: ChatFinishReason | None
    """tool_calls if the model has called a tool, unless the output limit ended the choice. function_call if the request
    has `functions`."""
    stop_reason: str | int | None
    """As in `End`."""


class ChatChoice(ChatEnd, Tokened):
    """One of `n`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Head, Timed, Spanned, Prompted, Scored):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict):
    """The name of a function, or what its arguments grew by."""

    name: NotRequired[str]
    """Present in the first delta of a call."""
    arguments: str


class ToolCallDelta(TypedDict):
    """What a call grew by."""

    index: int
    """Number of the call, from 0."""
    id: NotRequired[str]
    """Present in the first delta of a call, as is `type`."""
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What a choice grew by."""

    role: NotRequired[str]
    """Present in a choice's first chunk."""
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """The same as `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChatChunkChoice(ChatEnd, Tokened):
    """What one choice grew by."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Head, Used, Timed, Spanned, Prompted):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionLogprobs(TypedDict):
    """Of a choice, or of a part of one: lists of one length. The first token of an echoed prompt has none."""

    tokens: Annotated[Raw, _json_of(list[str])]
    token_logprobs: Annotated[Raw, _json_of(list[float | None])]
    top_logprobs: Annotated[Raw, _json_of(list[dict[str, float] | None])]
    text_offset: list[int]


class CompletionChoice(End, Tokened, Prompted, Scored):
    """One of `n` for each prompt, or what one grew by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Head, Used, Timed):
    """A response of /v1/completions, or one event of a streamed response."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
