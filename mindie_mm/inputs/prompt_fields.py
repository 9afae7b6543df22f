"""Fields of a request that change its prompt: template variables, tools, and fields that are not supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs.checks import require_dict, type_of

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values with the same meaning as a missing field."""
PROMPT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("continue_final_message", "chat_template", "documents", "functions"), OFF),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), OFF),  # only chat requests support these
    "function_call": (None, "none", "auto"),
    # In vLLM, -1 truncates the prompt to the context length. No accepted prompt is longer.
    "truncate_prompt_tokens": (*OFF, -1),
}
"""Unsupported fields of vLLM's and OpenAI's requests, each with the values that do not change the prompt."""


def template_variables(
    given: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    reasoning_effort: Any = None,
) -> dict[str, Any]:
    """Return the variables for a chat template, except the messages.

    Args:
        given: Variables that the caller passes, or None.
        tools: Tools that the model may call. They are omitted if `tool_choice` is "none".
        tool_choice: None, "auto" or "none".
        reasoning_effort: Any string, which is passed to the template unchanged, or None.

    Raises:
        InputError: `tool_choice` has another value, or `reasoning_effort` is not a string.

    """
    if tool_choice not in (None, "auto", "none"):
        raise InputError(
            f"tool_choice={tool_choice!r} must be 'auto' or 'none', because forced tool calls are not supported",
            param="tool_choice",
        )
    if not isinstance(reasoning_effort, str | None):
        raise InputError(f"reasoning_effort={reasoning_effort!r} must be a string", param="reasoning_effort")
    variables = dict(given or {})
    if tools and tool_choice != "none":
        variables["tools"] = tools
    if reasoning_effort:
        variables["reasoning_effort"] = reasoning_effort
    return variables


def refused_fields(given: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of the fields in `given` whose value is not allowed. `fields` lists the allowed values.

    Fields that `fields` does not contain may have any value.
    """
    return [
        name for name, value in given.items() if name in fields and not any(_same(value, one) for one in fields[name])
    ]


def _same(value: Any, one: Any) -> bool:
    """Return whether two values are equal in JSON, where 1 equals 1.0 but not true."""
    return (type(value) is type(one) or {type(value), type(one)} == {int, float}) and bool(value == one)


def require_tools(tools: Sequence[Any] | None) -> None:
    """Raise InputError unless each tool has OpenAI's format `{"type": "function", "function": {"name": ..., ...}}`.

    Chat templates do not check tools. Without this check, a prompt could describe a tool without a name.
    """
    with blaming("tools"):
        for index, tool in enumerate(tools or ()):
            _require_tool(tool, f"tools[{index}]")


def _require_tool(tool: Any, where: str) -> None:
    require_dict(tool, where)
    if (kind := tool.get("type")) != "function":
        raise InputError(f"{where}.type={kind!r} must be 'function'")
    _require_function(tool.get("function"), f"{where}.function")


def require_functions(functions: Sequence[Any] | None) -> None:
    """Raise InputError unless each function has OpenAI's deprecated format `{"name": ..., ...}`."""
    with blaming("functions"):
        for index, function in enumerate(functions or ()):
            _require_function(function, f"functions[{index}]")


def _require_function(function: Any, where: str) -> None:
    require_dict(function, where)
    for name, kind, wanted in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("parameters", Mapping, "a dict"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(name)
        if not isinstance(value, kind) and (value is not None or name == "name"):
            raise InputError(f"{where}.{name} is {type_of(value)}; it must be {wanted}")
