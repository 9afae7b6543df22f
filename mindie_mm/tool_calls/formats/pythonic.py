"""The format of Llama 4, and of other models that write calls in Python syntax."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from mindie_mm.structured.lark import Rules, json_value, separated
from mindie_mm.tool_calls.literals import LiteralScanner
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import NAME, NoMatch, Step
from mindie_mm.tool_calls.schemas import properties_of
from mindie_mm.tool_calls.tool import Tool

_RESTRICTING = frozenset({"enum", "const", "not", "if", "allOf", "anyOf", "oneOf", "$ref"})
"""Keywords that may exclude a constant."""
_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}


class PythonicParser(ToolCallParser, LiteralScanner):
    """A parser of `[f(a=1, s='x'), g()]`, whose values are Python literals.

    The list is at the beginning of the answer, or between `<|python_start|>` and `<|python_end|>`. vLLM calls this
    format `llama4_pythonic` and `pythonic`, and SGLang calls it `pythonic`.
    """

    markers = ("<|python_start|>", "<|python_end|>")
    openings = ("<|python_start|>",)
    starts: ClassVar[tuple[str, ...]] = ("[",)
    around = ("[", ", ", "]")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker, or describes the list as Llama's template does."""
        return "<|python_start|>" in template or "[func_name1(" in template

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool. Values are JSON, except that constants are Python constants."""
        arguments = []
        for name, (schema, is_required) in properties_of(tool, NAME).items():
            value = rules.add("value", " | ".join(cls._values(schema)))
            arguments.append((rules.add("argument", f"{rules.text(f'{name}=')} {value}"), is_required))
        return f"{rules.text(f'{tool.name}(')} {separated(arguments, rules.text(', '), rules)} {rules.text(')')}"

    @classmethod
    def _values(cls, schema: Mapping[str, Any]) -> list[str]:
        """Return alternatives that together match the values of a schema."""
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        constants = [_CONSTANTS[kind] for kind in kinds if isinstance(kind, str) and kind in _CONSTANTS]
        if not constants or not _RESTRICTING.isdisjoint(schema):
            return [json_value(schema)]
        others = [kind for kind in kinds if kind not in _CONSTANTS]
        return [*constants, *([json_value({**schema, "type": others})] if others else [])]

    @classmethod
    def written(cls, name: str, arguments: str) -> str | None:
        """Return a call as the model writes it."""
        try:
            values = json.loads(arguments)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            return f"{name}({arguments})"
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    def calls(self, opening: str) -> Step[None]:
        """Parse a list of calls."""
        yield from self.space()
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self.python_call(known=True)
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                break
        self.taken()
        yield from self.close("<|python_end|>")

    def python_call(self, *, known: bool = False) -> Step[None]:
        """Parse a call. If `known` is true, raise NoMatch if the call names an unknown tool."""
        name = yield from self.name()
        if known and self.tools and name not in self.tools:
            raise NoMatch
        yield from self.space()
        yield from self.expect("(")
        self.start_call(name)
        yield from self.any_members(")", self._parameter, self.call_ends())
        self.end_call()

    def finish_call(self) -> None:
        """Complete the current call, whose arguments end with the answer."""
        self.send_arguments(self.unfinished())
        super().finish_call()

    def _parameter(self) -> Step[None]:
        name = yield from self.name()
        yield from self.space()
        yield from self.expect("=")
        self.send_arguments(json.dumps(name, ensure_ascii=False))
