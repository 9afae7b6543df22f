"""Formats in which calls are written in Python syntax."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from mindie_mm.structured.lark import Rules, json_value, separated
from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.literals import LiteralScanner
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import NAME, Ended, NoMatch, Step
from mindie_mm.tool_calls.schemas import Tool, properties_of

_RESTRICTING = frozenset({"enum", "const", "not", "if", "allOf", "anyOf", "oneOf", "$ref"})
"""Keywords that may exclude a constant."""
_LFM2_START, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}


class PythonicParser(ToolCallParser, LiteralScanner):
    """A parser of `[f(a=1, s='x'), g()]`, whose values are Python literals.

    The list is at the beginning of the answer, or between `<|python_start|>` and `<|python_end|>`. vLLM calls this
    format `llama4_pythonic` and `pythonic`, and SGLang calls it `pythonic`.
    """

    in_templates = ("<|python_start|>", "[func_name1(")
    markers = ("<|python_start|>", "<|python_end|>")
    openings = ("<|python_start|>",)
    starts: ClassVar[tuple[str, ...]] = ("[",)
    around = ("[", ", ", "]")

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls to a tool. Values are JSON, except that constants are Python constants."""
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


class Lfm2Parser(PythonicParser, JsonCallParser):
    """A parser of `<|tool_call_start|>[f(a=1, s='x'), g()]<|tool_call_end|>`, whose values are Python literals.

    The brackets may be missing around a single call. A call may also be a JSON object, because a system message can ask
    for JSON. The chat templates do not escape quotes, so a quote within a string ends it only if the call can continue
    after the quote. vLLM and SGLang call this format `lfm2`.
    """

    markers = (_LFM2_START, _LFM2_END)
    openings = (_LFM2_START,)
    closings = (_LFM2_END,)
    starts = ()
    tool_names = NAME
    around = (f"{_LFM2_START}[", ", ", f"]{_LFM2_END}")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker, or lists the tools as templates of LFM2 do."""
        return _LFM2_START in template or ("List of tools: " in template and _LFM2_START in vocabulary)

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or a list of calls."""
        yield from self.space()
        is_list = bool((yield from self.accept("[")))
        yield from self.space()
        is_over = is_list and bool((yield from self.accept("]")))
        while not is_over:
            yield from self.space()
            if (yield from self.follows("{")):
                yield from self.call_object()
            else:
                yield from self.python_call()
            yield from self.space()
            is_over = not is_list or (yield from self.expect(",", "]")) == "]"
        self.taken()
        if (yield from self.close(_LFM2_END)):
            yield from self._drop_repetitions()

    def ends_string(self, quote: str) -> Step[bool]:
        """If `quote` follows and ends the string, read it. Return whether it ended the string."""
        start = self._at - self._kept
        if not (yield from super().ends_string(quote)):
            return False
        stop = self._at - self._kept
        ends = yield from self._continues()
        self._at = self._kept + (stop if ends else start)
        return ends

    def _continues(self) -> Step[bool]:
        yield from self.space()
        if (yield from self.surely_at_end()):
            return True
        following = yield from self.peek()
        if following != ")":
            return following in ",:]}"
        self._at += 1
        yield from self.space()
        return (yield from self.surely_at_end()) or bool((yield from self.surely_follows(",", "]", _LFM2_END)))

    def _drop_repetitions(self) -> Step[None]:
        """Drop lists of calls without a start marker. The models sometimes repeat a list after its end marker."""
        yield from self.space()
        while (yield from self.follows("[")):
            try:
                yield from self.until(_LFM2_START, _LFM2_END, at_most=sys.maxsize)
            except Ended:
                break
            if not (yield from self.accept(_LFM2_END)):
                break
            self.taken()
            yield from self.space()
        self._at = self._kept
