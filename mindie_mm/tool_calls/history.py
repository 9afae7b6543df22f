"""Rewrites tools and earlier tool calls to the form that the chat template expects, or to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.parsers.json_objects import HermesParser

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def adapted(
    messages: Sequence[Any],
    tools: Sequence[Any],
    traits: ChatTraits,
    parser: type[ToolCallParser],
    *,
    describes: bool = True,
) -> tuple[list[Any], Sequence[Any]]:
    """Return the messages and tools of a chat in the form that its chat template expects.

    Args:
        messages: Messages of the chat. They may be invalid.
        tools: Tools that the model may call.
        traits: Traits of the template.
        parser: Parser of the checkpoint's tool calls.
        describes: Whether to describe tools in a message if the template has no place for them. There are then no tools
            left for the template.

    """
    if not traits.names("function_call"):
        messages = with_tool_calls(messages)
    if traits.names("tools") and not traits.names("tool_calls"):
        messages = [with_written_calls(message, parser) for message in messages]
    if not traits.template or not describes or traits.names("tools"):
        return with_own_ids(messages, parser), tools
    return with_described_tools(messages, tools, takes_system=traits.takes_system), ()


def num_calls(messages: Sequence[Any]) -> int:
    """Return the number of calls in the messages of a chat. The messages may be invalid."""
    return sum(len(_calls(message)) for message in messages)


def with_tool_calls(messages: Sequence[Any]) -> list[Any]:
    """Return messages with tool calls and results in place of `function_call` and the role `function`.

    OpenAI's deprecated form has no ids, so a result belongs to the last call before it. Results without a call, and
    messages that are not valid, are returned unchanged.
    """
    rewritten: list[Any] = []
    call_id = None
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant" and isinstance(message.get("function_call"), Mapping) and not _calls(message):
            call_id = f"call_{number}"
            call = {"id": call_id, "type": "function", "function": message["function_call"]}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            rewritten.append({**rest, "tool_calls": [call]})
        elif role == "function" and call_id is not None:
            rewritten.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            rewritten.append(message)
    return rewritten


def with_own_ids(messages: Sequence[Any], parser: type[ToolCallParser]) -> list[Any]:
    """Return messages in which the ids of calls and of their results have the form that `parser` defines.

    A message that is not valid is not changed, because `parse_messages` reports it later.
    """
    own: dict[str, str] = {}
    number = 0
    rewritten: list[Any] = []
    for message in messages:
        changed = message
        if calls := _calls(message):
            renamed = []
            for call in calls:
                renamed.append(_renamed(call, parser, number, own))
                number += 1
            changed = {**message, "tool_calls": renamed}
        elif isinstance(message, Mapping) and isinstance(call_id := message.get("tool_call_id"), str):
            changed = {**message, "tool_call_id": own.get(call_id, call_id)}
        rewritten.append(changed)
    return rewritten


def _calls(message: Any) -> Sequence[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, list) else ()


def _renamed(call: Any, parser: type[ToolCallParser], number: int, own: dict[str, str]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        return call
    call_id = call.get("id")
    history_id = parser.history_id(call_id if isinstance(call_id, str) else "", name, number)
    if isinstance(call_id, str):
        own[call_id] = history_id
    return {**call, "id": history_id} if history_id else call


def with_described_tools(messages: Sequence[Any], tools: Sequence[Any], *, takes_system: bool) -> list[Any]:
    """Return messages that describe the tools, and contain earlier calls and their results as text.

    If there are no tools and no earlier calls, the messages are not changed.

    Args:
        messages: Messages of the chat.
        tools: Tools that the request offers. May be empty.
        takes_system: Whether the chat template supports a system message. If not, the description is put into the first
            user message.

    """
    if not tools and not any(map(_has_calls, messages)):
        return list(messages)
    rewritten: list[Any] = []
    answers_calls = False
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role in ("tool", "function"):
            response = _joined("<tool_response>\n", message.get("content"), "\n</tool_response>")
            if answers_calls:  # chat templates require that the roles alternate
                rewritten[-1] = {**rewritten[-1], "content": _joined(rewritten[-1]["content"], "\n", response)}
            else:
                rewritten.append({"role": "user", "content": response})
            answers_calls = True
            continue
        if role == "user" and answers_calls:
            rewritten[-1] = {
                **rewritten[-1],
                "content": _joined(rewritten[-1]["content"], "\n", message.get("content")),
            }
        else:
            rewritten.append(with_written_calls(message, HermesParser))
        answers_calls = False
    return _with_description(rewritten, tools, takes_system=takes_system) if tools else rewritten


def _with_description(messages: list[Any], tools: Sequence[Any], *, takes_system: bool) -> list[Any]:
    description = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if takes_system:
        if roles[:1] in (["system"], ["developer"]):
            content = _joined(messages[0].get("content"), "\n\n", description)
            return [{**messages[0], "content": content}, *messages[1:]]
        return [{"role": "system", "content": description}, *messages]
    if "user" not in roles:
        return [{"role": "user", "content": description}, *messages]
    at = roles.index("user")
    first = {**messages[at], "content": _joined(description, "\n\n", messages[at].get("content"))}
    return [*messages[:at], first, *messages[at + 1 :]]


def _has_calls(message: Any) -> bool:
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return False
    return bool(message.get("tool_calls"))


def with_written_calls(message: Any, parser: type[ToolCallParser]) -> Any:
    """Return a message of the assistant with its calls as text at the end of the content, in the format of `parser`.

    If the message has no calls, or the format cannot write calls, the message is returned unchanged.
    """
    if not _has_calls(message):
        return message
    calls = message["tool_calls"]
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    written = []
    for function in functions:
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            return message
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if (one := parser.written(name, text)) is None:
            return message
        written.append(one)
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    before, between, after = parser.around
    return {**rest, "content": _joined(content, "\n" if content else "", before + between.join(written) + after)}


def _joined(*contents: Any) -> Any:
    """Concatenate contents. Each content is a string, a list of parts or None."""
    if all(isinstance(content, str | None) for content in contents):
        return "".join(content or "" for content in contents)
    parts: list[Any] = []
    for content in contents:
        if isinstance(content, str):
            if content and parts and _is_text(parts[-1]):
                parts[-1] = {**parts[-1], "text": parts[-1]["text"] + content}
            elif content:
                parts.append({"type": "text", "text": content})
        elif isinstance(content, list):
            joins = bool(content and parts and _is_text(parts[-1]) and _is_text(content[0]))
            if joins:
                parts[-1] = {**content[0], "text": parts[-1]["text"] + content[0]["text"]}
            parts += content[joins:]
        elif content is not None:
            return content
    return parts


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
