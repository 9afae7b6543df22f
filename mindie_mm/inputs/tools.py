"""Checks of the tools in a chat request, and of the functions in its deprecated form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs.checks import require_dict, type_of


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
        raise InputError(f"{where}.type is {kind!r}; it must be 'function'")
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
