"""Translates a request of Anthropic's Messages API into a chat completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mindie_mm.errors import InputError
from service.messages.body import (
    AssistantMessage,
    Base64Source,
    ClientTool,
    DocumentBlock,
    ImageBlock,
    MessagesBody,
    PromptBody,
    SystemMessage,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
    UserMessage,
)
from service.request.translated import Part, Translated, chat_body_of, image_part, text_part
from service.schemas.openai_types import ChatBody

_BILLING = "x-anthropic-billing-header"
"""Beginning of text in which Claude Code reports usage. It differs in each request, so that no prefix would be
cached, and it means nothing to a model."""
_NAMES = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
"""Names of fields in Anthropic's API, by their names in a chat completion."""
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: MessagesBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the body of the chat completion for `body`. `messages` are those of `translated`.

    Raises:
        InputError: A tool or the choice of a tool is not valid.

    """
    form = body.output_format or (body.output_config and body.output_config.format)
    fields = {
        "model": body.model,
        "max_tokens": body.max_tokens or None,
        "stream": body.stream,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": None if body.stop_sequences is None else [*body.stop_sequences],
        "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.schema_}},
        "thinking_token_budget": body.thinking and body.thinking.budget_tokens,
        "parallel_tool_calls": False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
    }
    return chat_body_of(fields | prompt_fields(body, messages))


def prompt_fields(body: PromptBody, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a chat completion that decide the prompt. Raise InputError as `chat_body` does."""
    continues = _continues(body)
    thinks = body.thinking is not None and body.thinking.type == "enabled"
    return {
        "messages": [*messages],
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body.tool_choice, has_tools=bool(body.tools)),
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "chat_template_kwargs": {"enable_thinking": True} if thinks else None,
        "reasoning_effort": _effort(body),
    }


def _continues(body: PromptBody) -> bool:
    """Return whether the answer continues the last message. A message that ends with a tool call is complete."""
    last = body.messages[-1]
    return isinstance(last, AssistantMessage) and bool(last.content) and isinstance(last.content[-1], TextBlock)


def _effort(body: PromptBody) -> str | None:
    if body.thinking and body.thinking.type == "disabled":
        return "none"
    return body.output_config.effort if body.output_config else None


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | ({"strict": True} if tool.strict else {})}


def _choice(choice: ToolChoice | None, *, has_tools: bool) -> Any:
    if choice is None:
        return None
    if choice.type in ("any", "tool") and not has_tools:
        raise InputError(
            f"tool_choice.type is {choice.type!r}, but there are no tools; send tools, or leave tool_choice out",
            param="tool_choice",
        )
    if choice.type != "tool":
        return _MODES[choice.type]
    if choice.name is None:
        raise InputError("tool_choice.type is 'tool', which requires tool_choice.name", param="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def translated(body: PromptBody, *, takes_late_system: bool) -> Translated:
    """Return the messages of the chat completion for `body`.

    Results of tools precede the other content of their message, because chat templates expect them directly after the
    calls. `takes_late_system` is the trait of the chat template.
    """
    chat = Translated("messages", _NAMES, takes_late_system=takes_late_system, joins_turns=True)
    texts = [block.text for block in body.system or () if not block.text.startswith(_BILLING)]
    if text := "\n".join(texts):
        chat.add({"role": "system"}, "system", [(text_part(text), "system")])
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        match message:
            case UserMessage():
                _add_user(chat, message, where)
            case AssistantMessage():
                _add_assistant(chat, message, where)
            case SystemMessage():
                text = "\n".join(block.text for block in message.content)
                chat.add({"role": "system"}, where, [(text_part(text), where)])
    return chat


def _add_user(chat: Translated, message: UserMessage, where: str) -> None:
    parts: list[Part] = []
    for number, block in enumerate(message.content):
        place = f"{where}.content[{number}]"
        if not isinstance(block, ToolResultBlock):
            parts += _parts(block, place)
            continue
        result = [(text_part("Error: "), place)] if block.is_error else []
        for inner, one in enumerate(block.content or ()):
            result += _parts(one, f"{place}.content[{inner}]")
        chat.add({"role": "tool", "tool_call_id": block.tool_use_id}, place, _joined(result))
    if parts:
        chat.add({"role": "user"}, where, parts)
    if not message.content:
        raise InputError(f"{where}.content is empty; send a text block or another block", param="messages")


def _add_assistant(chat: Translated, message: AssistantMessage, where: str) -> None:
    said: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    chat.add(said, where, [(text_part("".join(texts)), where)] if texts else ())


def _parts(block: TextBlock | ImageBlock | DocumentBlock, where: str) -> list[Part]:
    match block:
        case TextBlock():
            return [(text_part(block.text), where)]
        case ImageBlock():
            return [(image_part(block.source.url), where)]
        case DocumentBlock():
            texts = [text for text in (block.title, block.context) if text]
            return [*((text_part(f"{text}\n"), where) for text in texts), *_document(block, where)]


def _document(block: DocumentBlock, where: str) -> list[Part]:
    source = block.source
    if isinstance(source, Base64Source):
        return [({"type": "file", "file": {"file_data": source.url}}, where)]
    if isinstance(source, URLSource):
        return [({"type": "document", "document": source.url}, where)]
    if isinstance(source, TextSource):
        return [(text_part(source.data), where)]
    return [
        part for index, one in enumerate(source.content) for part in _parts(one, f"{where}.source.content[{index}]")
    ]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return one text if all parts are texts, because many chat templates accept no list as the result of a tool."""
    if len(parts) < 2 or any(part["type"] != "text" for part, _ in parts):
        return [*parts]
    return [(text_part("".join(part["text"] for part, _ in parts)), parts[0][1])]
