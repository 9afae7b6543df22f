"""The formats of Gemma 4 and of FunctionGemma."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from mindie_mm.structured.lark import Rules, json_value, separated
from mindie_mm.tool_calls.literals import LiteralScanner, escaped
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.raw_strings import raw_string
from mindie_mm.tool_calls.scanner import NoMatch, Step, partial
from mindie_mm.tool_calls.schemas import Tool, branches_of, properties_of

_WRITTEN_KEY = re.compile(r'[^\s:{}\[\],<>"](?:[^:{}\[\],<>"\n]*[^\s:{}\[\],<>"])?')
_KEY = re.compile(r"[^:{}\[\],\n]+")


class Gemma4Parser(ToolCallParser, LiteralScanner):
    """A parser of `<|tool_call>call:f{a:1,s:<|"|>x<|"|>}<tool_call|>`.

    Keys are not quoted. Strings are raw text between two markers. vLLM and SGLang call this format `gemma4`.
    """

    quote: ClassVar[str] = '<|"|>'
    in_templates = ("<|tool_call>",)
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    openings = ("<|tool_call>",)
    closings = ("<tool_call|>",)
    excluded: ClassVar[tuple[str, ...]] = ('<|"|>',)

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls to a tool. Values other than strings are JSON."""
        arguments = []
        for name, (schema, is_required) in properties_of(tool, _WRITTEN_KEY).items():
            values = [cls._value(branch, rules) for branch in branches_of(schema, f"{tool.name}.{name}")]
            value = rules.add("value", rules.one_of(values))
            arguments.append((rules.add("argument", f"{rules.text(f'{name}:')} {value}"), is_required))
        before, after = rules.text(f"{cls.openings[0]}call:{tool.name}{{"), rules.text("}" + cls.closings[0])
        return f"{before} {separated(arguments, rules.text(','), rules)} {after}"

    @classmethod
    def _value(cls, branch: Mapping[str, Any], rules: Rules) -> str:
        if branch.get("type") == "string":
            return f"{rules.text(cls.quote)} {raw_string(rules, branch, cls.quote, cls.excluded)}"
        return json_value(branch)

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or several calls between one pair of markers."""
        yield from self.space()
        yield from self.expect("call:")
        while True:
            name = yield from self.name()
            yield from self.space()
            yield from self.expect("{")
            self.start_call(name)
            yield from self.any_members("}", self.key, self.call_ends())
            self.end_call()
            if (yield from self.close(*self.closings)) or not (yield from self.accept("call:")):
                break

    def finish_call(self) -> None:
        """Complete the current call, whose arguments end with the answer."""
        self.send_arguments(self.unfinished())
        super().finish_call()

    def key(self) -> Step[None]:
        """Read a key, with or without quotes, and the colon after it."""
        if (yield from self.follows(self.quote, '"')):
            yield from super().key()
            return
        key = (yield from self.until(":")).strip()
        if not _KEY.fullmatch(key):
            raise NoMatch
        yield from self.expect(":")
        self.send_arguments(json.dumps(key, ensure_ascii=False))

    def literal_string(self) -> Step[bool]:
        """Read a string between markers, or a JSON string."""
        if not (yield from self.surely_accept(self.quote)):
            return (yield from super().literal_string())
        self.send_arguments('"')
        self.taken()
        while not (yield from self.accept(self.quote)):
            stop = self._text.find(self.quote, self._at)
            self._at = stop if stop >= 0 else len(self._text) - partial(self._text, self._at, (self.quote,))
            self.send_arguments(escaped(self.taken()))
            if stop < 0:
                yield from self.more()
        self.send_arguments('"')
        return True


class FunctionGemmaParser(Gemma4Parser):
    """A parser of `<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>`.

    vLLM calls this format `functiongemma`.
    """

    quote = "<escape>"
    in_templates = ("<start_function_call>",)
    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
    openings = ("<start_function_call>",)
    closings = ("<end_function_call>",)
    excluded = ("<escape>",)
