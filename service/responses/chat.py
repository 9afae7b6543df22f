"""Translates a request of OpenAI's Responses API into a chat completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mindie_mm.errors import InputError
from service.request.translated import Translated, chat_body_of, image_part, text_part
from service.responses.body import (
    AudioPart,
    CustomCallItem,
    CustomOutputItem,
    CustomTool,
    FilePart,
    FunctionCallItem,
    FunctionOutputItem,
    GrammarFormat,
    ImagePart,
    InputItem,
    MessageItem,
    Part,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
)
from service.schemas.openai_types import ChatBody

_NAMES = {
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names of fields in the Responses API, by their names in a chat completion."""
CUSTOM_INPUT = "input"
"""Name of the argument that has the input of a custom tool. The model calls the tool as a function."""


def chat_body(body: ResponsesBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the body of the chat completion for `body`. `messages` are those of `translated`."""
    return chat_body_of(
        {
            "model": body.model,
            "messages": [*messages],
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": body.wants_logprobs,
            "top_logprobs": body.top_logprobs,
            "tools": [_tool(tool) for tool in body.tools or ()],
            "tool_choice": _choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": body.reasoning and body.reasoning.effort,
            "response_format": _format(body),
            "stream": body.stream,
            "stream_options": {"include_usage": True} if body.stream else None,
            "cache_salt": body.cache_salt,
        }
    )


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    form = body.text.format if body.text else None
    if form and form.get("type") == "json_schema" and not form.keys() & {"schema", "json_schema", "value"}:
        raise InputError("text.format.type is 'json_schema', which requires text.format.schema", param="text.format")
    return form


def _tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        text = {"type": "string"}
        if isinstance(tool.format, GrammarFormat):
            text["pattern"] = f"^(?:{tool.format.definition})$"
        schema = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": schema}
        function |= {"strict": True} if "pattern" in text else {}
    else:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        function |= {"strict": True} if tool.strict else {}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "custom":
        return {"type": "function", "name": choice.get("name")}
    return choice


def translated(
    instructions: str | None, items: Sequence[tuple[InputItem, str]], *, takes_late_system: bool
) -> Translated:
    """Return the messages of the chat completion.

    Args:
        instructions: Text of the system message, or None.
        items: Items of the conversation without references, each with its place in the client's request.
        takes_late_system: The trait of the chat template.

    Raises:
        InputError: A file has no content.

    """
    chat = Translated("input", _NAMES, takes_late_system=takes_late_system)
    if instructions:
        chat.add({"role": "system"}, "instructions", [(text_part(instructions), "instructions")])
    turn = _Turn(chat)
    for item, where in items:
        turn.add(item, where)
    turn.end()
    return chat


class _Turn:
    """Collects the items of one turn of the assistant, because chat templates expect one message for them."""

    def __init__(self, chat: Translated) -> None:
        self._chat = chat
        self._message: dict[str, Any] = {}
        self._texts: list[str] = []
        self._where = ""

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._begin(where)
                self._texts.append("".join(_text(part) for part in item.content))
            case ReasoningItem():
                if "tool_calls" in self._message or self._texts:  # reasoning begins a turn
                    self.end()
                self._begin(where)
                texts = [part.text for part in item.content or item.summary or ()]
                earlier = self._message.get("reasoning_content")
                if texts:
                    self._message["reasoning_content"] = "\n".join([*([earlier] if earlier else []), *texts])
            case FunctionCallItem():
                self._call(item.call_id, item.name, item.arguments, where)
            case CustomCallItem():
                arguments = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
                self._call(item.call_id, item.name, arguments, where)
            case FunctionOutputItem() | CustomOutputItem():
                self.end()
                parts = [(_part(part, where), f"{where}.output[{i}]") for i, part in enumerate(item.output)]
                message = {"role": "tool", "tool_call_id": item.call_id}
                self._chat.add(message, where, parts)
            case MessageItem():
                self.end()
                parts = [(_part(part, where), f"{where}.content[{i}]") for i, part in enumerate(item.content)]
                self._chat.add({"role": item.role}, where, parts)

    def end(self) -> None:
        """Add the message of the turn, if there is one."""
        if self._message:
            text = "\n".join(self._texts)
            self._chat.add(self._message, self._where, [(text_part(text), self._where)] if text else ())
        self._message, self._texts = {}, []

    def _begin(self, where: str) -> None:
        if not self._message:
            self._message, self._where = {"role": "assistant"}, where

    def _call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        self._begin(where)
        function = {"name": name, "arguments": arguments}
        self._message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _text(part: Part) -> str:
    if isinstance(part, RefusalPart):
        return part.refusal
    return getattr(part, "text", "")


def _part(part: Part, where: str) -> dict[str, Any]:
    match part:
        case ImagePart():
            return image_part(part.image_url, part.detail)
        case AudioPart():
            return {"type": "input_audio", "input_audio": part.input_audio.model_dump(exclude_none=True)}
        case FilePart(file_data=str()):
            file = {"file_data": part.file_data, "filename": part.filename}
            return {"type": "file", "file": {name: value for name, value in file.items() if value is not None}}
        case FilePart(file_url=str()):
            return {"type": "document", "document": part.file_url}
        case FilePart():
            raise InputError(
                f"{where} has a file without file_data, file_url and file_id; send one of them", param="input"
            )
        case _:
            return text_part(_text(part))
