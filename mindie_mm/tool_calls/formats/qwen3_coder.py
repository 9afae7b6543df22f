"""The format of Qwen3-Coder, Qwen3.5 and later."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.tool import Tool
from mindie_mm.tool_calls.typed_text import TypedTextParser


class Qwen3CoderParser(TypedTextParser):
    r"""A parser of `<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>`.

    A newline directly after the opening tag of a value and a newline directly before its closing tag are not part of
    the value. The model sometimes omits `<tool_call>` or `</parameter>`. `</parameter>` ends a value only if
    `<parameter=` or `</function>` follows, and `</function>` ends a value only if `</tool_call>` follows. vLLM and
    SGLang call this format `qwen3_coder`.
    """

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>", "<function=")
    closings = ("</tool_call>",)
    ends_reasoning = True
    around = ("", "\n", "")
    tags_of_argument = ("<parameter={name}>\n", "\n</parameter>\n")
    excluded = ("<parameter=", "</parameter>", "</function>")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the tags."""
        return "<function=" in template and "<parameter=" in template

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        before = rules.text(f"<tool_call>\n<function={tool.name}>\n")
        after = rules.text("</function>\n</tool_call>")
        return f"{before} {cls.arguments_rule(tool, rules)} {after}"

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        if opening != "<function=":
            yield from self.space()
            yield from self.expect("<function=")
        name = yield from self.name()
        yield from self.expect(">")
        self.start_arguments(name)
        yield from self.space()
        while (yield from self.expect("<parameter=", "</function>")) == "<parameter=":
            parameter = yield from self.until(">")
            yield from self.expect(">")
            yield from self.accept("\n")
            yield from self.argument(parameter, self._value_ends)
            yield from self.space()
        self.end_arguments()
        yield from self.close("</tool_call>")

    def _value_ends(self) -> Step[bool]:
        has_newline = yield from self.accept("\n")
        if (yield from self.surely_accept("</parameter>")):
            yield from self.space()
            return bool((yield from self.surely_follows("<parameter=", "</function>")))
        if (yield from self.surely_follows("<parameter=")):
            return bool(has_newline)
        start = self._at - self._kept
        if not (yield from self.surely_accept("</function>")):
            return False
        yield from self.space()
        ends = (yield from self.surely_at_end()) or (yield from self.surely_follows("</tool_call>"))
        self._at = self._kept + start
        return bool(ends)
