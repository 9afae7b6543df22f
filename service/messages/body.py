"""Request bodies of Anthropic's Messages API. The format is that of anthropic's Python client 2.14."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mindie_mm.inputs import OFF
from service.schemas.body import INT32_MAX, WHOLE, Array, Body, Fields, NotServed, Stop, TopP


class Base64Source(Fields):
    """Content as base64."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^[\w.+-]+/[\w.+-]+$", max_length=100)]
    data: str

    @property
    def url(self) -> str:
        """The content as a data: URL."""
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(Fields):
    """Content at a URL."""

    type: Literal["url"]
    url: str


class TextSource(Fields):
    """A document that is plain text."""

    type: Literal["text"]
    data: str


class TextBlock(Fields):
    """Text."""

    type: Literal["text"]
    text: str


class ImageBlock(Fields):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]


def _as_blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


_ONE_TEXT = BeforeValidator(_as_blocks, json_schema_input_type=str | list[dict[str, Any]])
"""Validator that accepts a string as a list with one text."""


class ContentSource(Fields):
    """A document that consists of texts and images."""

    type: Literal["content"]
    content: Annotated[Array[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], _ONE_TEXT]


class DocumentBlock(Fields):
    """A document: a PDF, plain text, or texts and images."""

    type: Literal["document"]
    source: Annotated[Base64Source | URLSource | TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    """Text before the document, like `context`."""
    context: str | None = None


ResultBlock = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(Fields):
    """The result of a tool that the assistant has called."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Array[ResultBlock], _ONE_TEXT] | None = None
    is_error: bool | None = None
    """True if the tool has failed. The result then begins with "Error: "."""


class ToolUseBlock(Fields):
    """A call to a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Fields):
    """Reasoning of the assistant in an earlier turn. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Fields):
    """Encrypted reasoning of another service's assistant. It is left out, because nobody else can read it."""

    type: Literal["redacted_thinking"]


UserBlock = TextBlock | ImageBlock | DocumentBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
Texts = Annotated[Array[TextBlock], _ONE_TEXT]


class UserMessage(Fields):
    """A message of the user."""

    role: Literal["user"]
    content: Annotated[Array[Annotated[UserBlock, Field(discriminator="type")]], _ONE_TEXT]


class AssistantMessage(Fields):
    """A message of the assistant. If it is the last message, the answer continues it."""

    role: Literal["assistant"]
    content: Annotated[Array[Annotated[AssistantBlock, Field(discriminator="type")]], _ONE_TEXT]


class SystemMessage(Fields):
    """Instructions. Claude Code sends them between other messages, too."""

    role: Literal["system"]
    content: Texts


class ClientTool(Fields):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """JSON schema of the input."""
    strict: bool | None = None
    """True if the input must fit the schema even when the model decides itself to call a tool."""


class ToolChoice(Fields):
    """Rule for calling tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool to call, if `type` is "tool"."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """True if the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """Maximum number of reasoning tokens."""


class Format(Fields):
    """The JSON schema that the answer fits."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Effort and format of the answer."""

    effort: str | None = None
    """Variable `reasoning_effort` of the chat template."""
    format: Format | None = None


class PromptBody(Body):
    """Fields of a message and of /v1/messages/count_tokens."""

    not_served: ClassVar[NotServed] = dict.fromkeys(("container", "mcp_servers"), OFF)
    ignored: ClassVar[Collection[str]] = (
        *("metadata", "service_tier", "cache_control", "context_management", "betas", "inference_geo", "speed"),
        *("max_tokens", "stream", "temperature", "top_k", "top_p", "stop_sequences"),  # in /v1/messages/count_tokens
    )

    messages: Annotated[
        Array[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts | None = None
    """Instructions."""
    tools: Array[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    """Earlier name of the format in `output_config`."""


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
    """Maximum number of tokens to generate. It is reduced to the room in the model's context. With 0, the prompt fills
    the prefix cache, and nothing is generated."""
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    stop_sequences: Stop | None = None
