"""Reads the tools of a chat request, and the `tool_choice` that says which of them the model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindie_mm.errors import InputError
from mindie_mm.inputs import require_functions, require_tools
from mindie_mm.tool_calls.scanner import MAX_NAME
from mindie_mm.tool_calls.schemas import Tool
from service.schemas.body import Array, Fields
from service.schemas.closed_objects import closed
from service.schemas.message_types import AnyFunction, AnyFunctionChoice, AnyTool, AnyToolChoice

_MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""Mode for each keyword of `tool_choice`. Mistral and Anthropic use `any` for `required`."""
_FORMS = '\'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and the rules for calling them."""

    offered: Sequence[Mapping[str, Any]] = ()
    """Tools that the prompt describes, as the client sent them. Empty if the model may not call tools."""
    mode: Literal["none", "auto", "required"] = "none"
    """Whether the model must not call a tool, decides by itself, or must call a tool."""
    name: str | None = None
    """Name of the only tool that the model may call, or None if it may call any tool in `offered`."""
    parallel: bool = True
    """True if the answer may have several calls. If `name` is set, the default is a single call."""
    is_deprecated: bool = False
    """True if the request has OpenAI's deprecated `functions`. A call in the answer is then a `function_call`."""

    @classmethod
    def of(cls, tools: Sequence[Any] | None, tool_choice: Any, parallel: bool | None) -> ToolUse:
        """Read the fields of a request.

        Raises:
            InputError: A tool or the choice is not valid, or the choice requires tools that are missing.

        """
        require_tools(tools)
        names = [tool["function"]["name"] for tool in tools or ()]
        _require_names(names, "tools", ".function")
        mode, name, allowed = _choice(tool_choice)
        if not tools and mode == "required":
            raise InputError(
                f"tool_choice is {_shown(tool_choice)}, but there are no tools; send tools, or leave tool_choice out",
                param="tool_choice",
            )
        _require_listed(allowed or ([] if name is None else [name]), names, "tool_choice", "a tool")
        if mode == "none" or not tools:
            return cls()
        offered = [tool for tool in tools if allowed is None or tool["function"]["name"] in allowed]
        return cls(offered, mode, name, parallel is not False and (name is None or parallel is True))

    @classmethod
    def of_functions(cls, functions: Sequence[Any], function_call: Any) -> ToolUse:
        """Read OpenAI's deprecated fields. The answer then has at most one call.

        Raises:
            InputError: A function or the choice is wrong.

        """
        require_functions(functions)
        names = [function["name"] for function in functions]
        _require_names(names, "functions")
        name = None
        if function_call not in (None, "none", "auto"):
            name = function_call.get("name") if isinstance(function_call, Mapping) else None
            if not isinstance(name, str):
                raise InputError(
                    f"function_call={_shown(function_call)} must be 'none', 'auto' or {{\"name\": ...}}",
                    param="function_call",
                )
            _require_listed([name], names, "function_call", "a function")
        if function_call == "none":
            return cls(is_deprecated=True)
        offered = [{"type": "function", "function": function} for function in functions]
        return cls(offered, "auto" if name is None else "required", name, parallel=False, is_deprecated=True)

    @property
    def field(self) -> str:
        """Name of the request field that contains the tools."""
        return "functions" if self.is_deprecated else "tools"

    @property
    def choice_field(self) -> str:
        """Name of the request field that says which tool to call."""
        return "function_call" if self.is_deprecated else "tool_choice"

    @property
    def is_strict(self) -> bool:
        """True if calls to some tool must have valid arguments even if the model decides whether to call tools."""
        return any(tool["function"].get("strict") for tool in self.offered)

    @property
    def callable_names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [self.name] if self.name is not None else [tool["function"]["name"] for tool in self.offered]

    def tools(self, *, close: bool) -> list[Tool]:
        """Return the tools as a parser expects them. `close` has the same meaning as in `Settings.structure`."""
        functions = [tool["function"] for tool in self.offered]
        try:
            return [
                Tool(
                    function["name"],
                    closed(schema)
                    if (schema := function.get("parameters")) and (close or function.get("strict"))
                    else schema,
                )
                for function in functions
            ]
        except RecursionError as error:
            raise InputError("the parameters of a tool are nested too deeply", param=self.field) from error


class ToolFields(Fields):
    """Fields of a chat that offer tools, and their deprecated forms."""

    tools: Array[AnyTool] | None = None
    """Tools that the model may call. An empty list counts as null."""
    tool_choice: AnyToolChoice = None
    """"auto" (the default), "none", "required", or an object that names a tool."""
    functions: Array[AnyFunction] | None = None
    """Deprecated form of `tools`. An empty list counts as null."""
    function_call: AnyFunctionChoice = None
    """Deprecated form of `tool_choice`: "auto" (the default), "none" or `{"name": ...}`."""

    def tool_use(self, parallel: bool | None = None) -> ToolUse:
        """Return the tools, and how the model may call them. `parallel` is the field `parallel_tool_calls`.

        Raises:
            InputError: A field is wrong, or fields contradict each other.

        """
        if not self.functions:
            harmless = (None, "auto") if self.tools else (None, "auto", "none")
            if self.function_call not in harmless:
                raise InputError(
                    f"function_call is {_shown(self.function_call)}, but there are no functions; with tools, use "
                    "tool_choice",
                    param="function_call",
                )
            return ToolUse.of(self.tools, self.tool_choice, parallel)
        if self.tools or self.tool_choice not in (None, "auto"):
            raise InputError(
                "the request has functions, the deprecated form of tools, together with tools or tool_choice; leave "
                "functions out",
                param="functions",
            )
        return ToolUse.of_functions(self.functions, self.function_call)


def _require_names(names: Sequence[str], field: str, inside: str = "") -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        where = f"{field}[{index}]{inside}.name"
        if not name or len(name) > MAX_NAME:
            raise InputError(f"{where} has {len(name)} characters; it must have 1 to {MAX_NAME}", param=field)
        if not name.isprintable():
            raise InputError(f"{where} is {name!r}, which has characters that cannot be printed", param=field)
        if name in seen:
            raise InputError(f"{where} is {name!r}, which is also the name of another tool", param=field)
        seen.add(name)


def _require_listed(chosen: Sequence[str], names: Sequence[str], field: str, what: str) -> None:
    for name in chosen:
        if name not in names:
            raise InputError(f"{field} has the name {name[:MAX_NAME]!r}, which is not the name of {what}", param=field)


def _choice(given: Any) -> tuple[Literal["none", "auto", "required"], str | None, Sequence[str] | None]:
    """Return the mode, the name of the only tool to call or None, and the names of the tools to offer (None: all)."""
    error = InputError(f"tool_choice={_shown(given)} must be {_FORMS}", param="tool_choice")
    if given is None:
        return "auto", None, None
    if isinstance(given, str):
        mode = _MODES.get(given)
        if mode is None:
            raise error
        return mode, None, None  # type: ignore[return-value]
    if not isinstance(given, Mapping):
        raise error
    kind = given.get("type", "function")
    if isinstance(kind, str) and kind in _MODES:
        return _MODES[kind], None, None  # type: ignore[return-value]
    if kind == "allowed_tools":
        return _allowed(given.get("allowed_tools", given), error)
    if kind not in ("function", "tool"):
        raise error
    return "required", _name_of(given, error), None


def _allowed(
    given: Any, error: InputError
) -> tuple[Literal["none", "auto", "required"], str | None, Sequence[str] | None]:
    """Read OpenAI's `allowed_tools`, a choice that restricts the model to some of the tools."""
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools := given.get("tools"), list) or not tools:
        raise error
    return mode, None, [_name_of(tool, error) for tool in tools]


def _name_of(given: Any, error: InputError) -> str:
    """Return the function's name from `{"function": {"name": ...}}` or `{"name": ...}`.

    Newer APIs and Anthropic use the second form. Raise `error` if there is no name.
    """
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise error
    return name


def _shown(given: Any) -> str:
    return repr(given) if given is None or isinstance(given, str | int | float) else f"of type {type(given).__name__}"
