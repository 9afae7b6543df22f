"""The formats of GLM-4.5 and of GLM-4.7 and later."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.tool import Tool
from mindie_mm.tool_calls.typed_text import TypedTextParser


class Glm45Parser(TypedTextParser):
    r"""A parser of `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`.

    Whitespace within a value is part of the value. Newlines between the tags may be missing, as in GLM-4.7. vLLM and
    SGLang call this format `glm45`.
    """

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    around = ("", "\n", "")
    tags_of_argument = ("\n<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>")
    excluded = ("</arg_value>", "</tool_call>")
    before_end: ClassVar[str] = "\n"

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the tags."""
        return "<arg_key>" in template

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        before = rules.text(f"<tool_call>{tool.name}")
        return f"{before} {cls.arguments_rule(tool, rules)} {rules.text(cls.before_end + '</tool_call>')}"

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        yield from self.space()
        name = yield from self.name()
        yield from self.space()
        following = yield from self.expect("<arg_key>", "</tool_call>")
        self.start_arguments(name)
        while following == "<arg_key>":
            key = yield from self.until("</arg_key>")
            yield from self.expect("</arg_key>")
            yield from self.space()
            yield from self.expect("<arg_value>")
            yield from self.argument(key.strip(), self._value_ends)
            yield from self.space()
            following = yield from self.expect("<arg_key>", "</tool_call>")
        self.end_arguments()

    def _value_ends(self) -> Step[bool]:
        if (yield from self.surely_accept("</arg_value>")):
            return True
        start = self._at - self._kept
        if not (yield from self.surely_accept("</tool_call>")):
            return False
        # If </arg_value> is missing, the value ends only where the call ends.
        yield from self.space()
        ends = (yield from self.surely_at_end()) or (yield from self.surely_follows("<tool_call>"))
        self._at = self._kept + start
        return bool(ends)


class Glm47Parser(Glm45Parser):
    """A parser of `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    vLLM and SGLang call this format `glm47`.
    """

    around = ("", "", "")
    tags_of_argument = ("<arg_key>{name}</arg_key><arg_value>", "</arg_value>")
    before_end = ""

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the tags without newlines between them."""
        return "</arg_key><arg_value>" in template
