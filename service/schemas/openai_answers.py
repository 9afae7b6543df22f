"""Types of the responses of the OpenAI-compatible endpoints, for mypy and for the OpenAPI description.

Responses are plain dicts. Keys that are not required are present if the request asks for them. In answers that are not
streamed, some keys are None otherwise, as in vLLM, because clients read them without checking whether they exist.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from msgspec import Raw
from pydantic import GetPydanticSchema
from typing_extensions import TypedDict

from mindie_mm.engine.requests.engine_messages import FinishReason
from service.schemas.choices import SpanEntry, Timed, Usage, Used


def json_of(kind: Any) -> GetPydanticSchema:
    """Return an annotation that gives encoded JSON the type `kind` in the OpenAPI description."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


class Head(TypedDict):
    """Fields at the start of every response and chunk."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """Hash of the checkpoint's settings, of the software version and of the settings that may change an answer."""


class Prompted(TypedDict):
    """The prompt's tokens, or None unless the request sets `return_token_ids`. A stream has them in one chunk only."""

    prompt_token_ids: NotRequired[list[int] | None]


class Tokened(TypedDict):
    """The tokens of a choice, or of a part of one, or None unless the request sets `return_token_ids`."""

    token_ids: NotRequired[list[int] | None]


class PromptToken(TypedDict):
    """A token of a prompt, or a token that would have been likely at its position."""

    logprob: float
    rank: int | None
    """Rank of the token by probability. The most likely token has rank 1."""
    decoded_token: str


class Scored(TypedDict):
    """Log-probabilities of the prompt, or None unless the request sets `prompt_logprobs`. Not in streams."""

    prompt_logprobs: NotRequired[Annotated[Raw, json_of(list[dict[str, PromptToken] | None])] | None]
    """One object per token. The keys of the object are token ids. The first token has null instead of an object."""


class Spanned(TypedDict):
    """The part of a chat's answer or first chunk that is present if the request sets `media_spans`."""

    media_spans: NotRequired[list[SpanEntry]]


class End(TypedDict):
    """The reason why a choice of a text completion ended. Both fields are None until the choice ends."""

    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or the id from `stop_token_ids` that ended the choice. None if something else ended it."""


class ChatToken(TypedDict):
    """A token and its log-probability."""

    token: Annotated[Raw, json_of(str)]
    logprob: float
    bytes: Annotated[Raw, json_of(list[int])]


class ChatPosition(ChatToken):
    """A token of the answer, and the most likely tokens at its position."""

    top_logprobs: Annotated[list[ChatToken] | Raw, json_of(list[ChatToken])]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's choice or chunk."""

    content: Annotated[Raw, json_of(list[ChatPosition])]


class CalledFunction(TypedDict):
    """A function that the model calls."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class ToolCall(TypedDict):
    """A call to a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The text and the tool calls of an answer."""

    role: str
    """`assistant`, or the role of the last message if `add_generation_prompt` is false."""
    content: str | None
    """None if there are tool calls and no text."""
    refusal: None
    reasoning_content: str | None
    """Reasoning before the answer, or None if there is none."""
    reasoning: str | None
    """The same as `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCall]]
    """Present if the model calls a tool."""
    function_call: NotRequired[CalledFunction]
    """Present instead of `tool_calls` if the request has `functions`."""


ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class ChatEnd(TypedDict):
    """The reason why a choice of a chat completion ended. Both fields are None until the choice ends."""

    finish_reason: ChatFinishReason | None
    """tool_calls if the model has called a tool, unless the output limit ended the choice. function_call if the request
    has `functions`."""
    stop_reason: str | int | None
    """Has the same meaning as in `End`."""


class ChatChoice(ChatEnd, Tokened):
    """One of the `n` choices."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Head, Timed, Spanned, Prompted, Scored):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict):
    """The name of a function, or the next piece of its arguments."""

    name: NotRequired[str]
    """Present in the first delta of a call."""
    arguments: str


class ToolCallDelta(TypedDict):
    """The next piece of a tool call."""

    index: int
    """Index of the call in its message."""
    id: NotRequired[str]
    """Present in the first delta of a call, like `type`."""
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """The next piece of a message."""

    role: NotRequired[str]
    """Present in a choice's first chunk."""
    content: NotRequired[str]
    reasoning_content: NotRequired[str | None]
    """Present if the checkpoint writes reasoning."""
    reasoning: NotRequired[str | None]
    """The same as `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChatChunkChoice(ChatEnd, Tokened):
    """The next piece of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Head, Used, Timed, Spanned, Prompted):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a choice or of an event. All lists have one entry per token.

    The first token of an echoed prompt has no log-probability, so its entries are null.
    """

    tokens: Annotated[Raw, json_of(list[str])]
    token_logprobs: Annotated[Raw, json_of(list[float | None])]
    top_logprobs: Annotated[Raw, json_of(list[dict[str, float] | None])]
    text_offset: list[int]


class CompletionChoice(End, Tokened, Prompted, Scored):
    """One of the `n` choices of a prompt, or the next piece of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Head, Used, Timed):
    """A response of /v1/completions, or one event of a streamed response."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
