"""Parsing of chat messages and their tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs.checks import require_dict, require_list, require_unicode, type_of
from mindie_mm.inputs.items import CUSTOM_ROLE, ROLES, Message, media_of_messages
from mindie_mm.inputs.parts import add_frames, parse_parts
from mindie_mm.inputs.unknown_keys import require_known_keys

MAX_ARGUMENT_VALUES = 2**18
"""Maximum number of JSON values in the arguments of all tool calls of a chat.

The number is estimated by counting brackets, braces and commas, including those inside strings. The arguments are JSON
inside a JSON string, so a count in the encoded request would miss escaped commas.
"""
_BETWEEN_VALUES = ",[{"
_CUSTOM_ROLE = re.compile(CUSTOM_ROLE, re.ASCII)
_MAX_SHOWN = 64


def parse_messages(
    messages: Sequence[Mapping[str, Any]], *, strict: bool = False, by_uuid: bool = False
) -> list[Message]:
    """Parse chat messages in OpenAI or Hugging Face style.

    Args:
        messages: The messages, as in a request.
        strict: Whether to refuse every unknown key of a message or a content part, as `parse_inputs` does.
        by_uuid: Whether to read the `uuid` of media items, and to allow items that have a `uuid` but no data.

    Raises:
        InputError: A message is invalid. The error states the message, the content part and the limit.
        LimitExceeded: The arguments of tool calls or the lists of video frames are too long.

    """
    require_list(messages, "messages")
    parsed: list[Message] = []
    num_frames = num_values = 0
    for index, message in enumerate(messages):
        num_values += _num_argument_values(message)
        if num_values > MAX_ARGUMENT_VALUES:
            raise LimitExceeded(
                f"the arguments of tool calls have more JSON values than the limit of {MAX_ARGUMENT_VALUES}"
            )
        parsed.append(_parse_message(message, f"messages[{index}]", strict=strict, by_uuid=by_uuid))
        num_frames = add_frames(num_frames, media_of_messages(parsed[-1:]), "messages")
    return parsed


def _parse_message(message: Mapping[str, Any], where: str, *, strict: bool, by_uuid: bool) -> Message:
    require_dict(message, where)
    if (key := next((key for key in message if not isinstance(key, str)), None)) is not None:
        raise InputError(f"{where} has a key of type {type(key).__name__}; keys must be strings")
    role = message.get("role")
    if not isinstance(role, str) or (role not in ROLES and not _CUSTOM_ROLE.fullmatch(role)):
        raise InputError(
            f"{where}.role={_shortened(role)!r} must be one of {', '.join(ROLES)}, or another role that the "
            "chat template accepts, with at most 64 letters, digits, '_', '-' and '.'"
        )
    content = message.get("content")
    if role == "assistant" and isinstance(content, list | tuple) and not content:
        content = None  # some clients send an empty list for a turn that has only tool calls or no answer
    if isinstance(content, str):
        require_unicode(content, f"{where}.content")
    elif content is not None:
        content = parse_parts(content, f"{where}.content", strict=strict, by_uuid=by_uuid)
    if content is None and role != "assistant":
        raise InputError(f"{where} has no content; only the content of an assistant message may be missing")
    extra = {key: value for key, value in message.items() if key not in {"role", "content"} and value is not None}
    if strict:
        require_known_keys(extra, where)
    if "tool_calls" in extra:
        extra["tool_calls"] = _parse_tool_calls(extra["tool_calls"], f"{where}.tool_calls")
    return Message(role, content, extra)


def _shortened(role: Any) -> Any:
    return role[:_MAX_SHOWN] if isinstance(role, str) else role


def _num_argument_values(message: Any) -> int:
    """Return the estimated number of values in the tool calls of a message. The message has not been checked yet."""
    if not isinstance(message, Mapping) or not isinstance(calls := message.get("tool_calls"), (list, tuple)):
        return 0
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    texts = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return sum(text.count(mark) for text in texts if isinstance(text, str) for mark in _BETWEEN_VALUES)


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in the form that chat templates expect. Arguments become dicts instead of JSON strings.

    Arguments that are not a valid JSON object stay as the model wrote them, because a later message may ask the model
    to correct them.
    """
    if not isinstance(calls, (list, tuple)):
        raise InputError(f"{where} is {type_of(calls)}; it must be a list")
    return [_parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    require_dict(call, where)
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments") or "{}", str):
        return dict(call)
    require_unicode(text, f"{where}.function.arguments")
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
        msgspec.msgpack.encode(arguments)  # fails for integers of more than 64 bits, which cannot be sent as msgpack
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, OverflowError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
