"""Request bodies of OpenAI's Responses API. The format is that of openai's Python client 3.57."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mindie_mm.inputs import OFF
from service.schemas.body import Array, Body, CacheSalt, Fields, Logprobs, MaxTokens, NotServed, TopP


class TextPart(Fields):
    """Text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Fields):
    """A refusal by the assistant in an earlier turn."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(Fields):
    """An image."""

    type: Literal["input_image"]
    image_url: str
    """An http:, https: or data: URL."""
    detail: str | None = None


class FilePart(Fields):
    """A PDF or a text file."""

    type: Literal["input_file"]
    file_data: str | None = None
    """Content of the file, as a data: URL or as base64."""
    file_url: str | None = None
    """URL of a PDF, in place of `file_data`."""
    file_id: str | None = None
    """Id of a file of /v1/files, in place of `file_data`."""
    filename: str | None = None


class InputAudio(Fields):
    """The data of an audio clip."""

    data: str
    """Base64."""
    format: str | None = None


class AudioPart(Fields):
    """An audio clip."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = TextPart | RefusalPart | ImagePart | FilePart | AudioPart


def _as_parts(given: Any) -> Any:
    return [{"type": "input_text", "text": given}] if isinstance(given, str) else given


Parts = Annotated[
    Array[Annotated[Part, Field(discriminator="type")]],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[dict[str, Any]]),
]
"""A list of parts, or a string."""


class ItemFields(Fields):
    """Fields that all items have."""

    id: str | None = None
    status: str | None = None


class MessageItem(ItemFields):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(ItemFields):
    """Reasoning of the assistant in an earlier turn."""

    type: Literal["reasoning"]
    summary: Array[TextPart] | None = None
    content: Array[TextPart] | None = None


class FunctionCallItem(ItemFields):
    """A call to a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(ItemFields):
    """The output of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class CustomCallItem(ItemFields):
    """A call to a custom tool by the assistant."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CustomOutputItem(ItemFields):
    """The output of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Parts


class ReferenceItem(Fields):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(given: Any) -> str | None:
    """Return the type of an item. Messages and references may leave it out."""
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    if kind is not None:
        return str(kind)
    has_role = "role" in given if isinstance(given, Mapping) else hasattr(given, "role")
    return "message" if has_role else "item_reference"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="no_item",
        custom_error_message="must be an item of the type message, reasoning, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output or item_reference",
    ),
]


def _as_items(given: Any) -> Any:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Fields):
    """A function that the client runs."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class AnyFormat(Fields):
    """The input of a custom tool may be any text."""

    type: Literal["text"]


class GrammarFormat(Fields):
    """The input of a custom tool matches a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["regex"]
    """Grammars in Lark's syntax are not supported, because the input is written as a string in JSON."""
    definition: str
    """A regular expression in the syntax of Rust, which the whole input matches."""


class CustomTool(Fields):
    """A tool that the client runs, whose input is text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[AnyFormat | GrammarFormat, Field(discriminator="type")] | None = None


class Reasoning(Fields):
    """How much the model reasons, and whether the answer summarizes the reasoning."""

    ignored: ClassVar[Collection[str]] = ("context",)

    effort: str | None = None
    """Variable `reasoning_effort` of the chat template."""
    summary: str | None = None
    """If it is set, the reasoning is sent as a summary. It is not shortened."""
    generate_summary: str | None = None
    """Deprecated form of `summary`."""


class TextOptions(Fields):
    """Format of the answer."""

    ignored: ClassVar[Collection[str]] = ("verbosity",)

    format: dict[str, Any] | None = None
    """Has the same meaning as `response_format` in a chat completion."""


class ResponsesBody(Body):
    """POST /v1/responses."""

    not_served: ClassVar[NotServed] = {
        **dict.fromkeys(("background", "conversation", "prompt"), OFF),
        **dict.fromkeys(("moderation", "image"), OFF),
    }
    ignored: ClassVar[Collection[str]] = (
        *("user", "truncation", "include", "stream_options", "max_tool_calls", "prompt_cache_options"),
        *("context_management", "background_options", "access_programs"),
    )

    input: Annotated[
        Array[InputItem],
        Field(min_length=1),
        BeforeValidator(_as_items, json_schema_input_type=str | list[dict[str, Any]]),
    ]
    """A string, or a list of items."""
    instructions: str | None = None
    """System message. It does not apply to later responses."""
    max_output_tokens: MaxTokens | None = None
    """Maximum number of tokens to generate. It is reduced to the room in the model's context."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_logprobs: Logprobs | None = None
    """Number of most likely tokens to report per position."""
    include: Array[str] | None = None
    """`message.output_text.logprobs` reports log-probabilities. Other values have no effect."""
    tools: Array[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    store: bool | None = None
    """True if later requests may refer to the response. Default: true, if the service stores responses."""
    previous_response_id: str | None = None
    """Id of a stored response. Its conversation precedes the input."""
    metadata: dict[str, Any] | None = None
    """Returned with the response."""
    cache_salt: CacheSalt | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def summarizes(self) -> bool:
        """True if reasoning is sent as a summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)
