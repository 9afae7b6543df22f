"""Rewrites the ids of tool calls in earlier messages to the form that the chat template expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.tool_calls.parser import ToolCallParser


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
