"""The format of MiniCPM5."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.tool import Tool
from mindie_mm.tool_calls.typed_text import TypedTextParser


class MiniCPM5Parser(TypedTextParser):
    """A parser of `<function name="f"><param name="a">1</param></function>`. vLLM calls this format `minicpm5`."""

    markers = ("<function", "</function>", "<param", "</param>")
    openings = ('<function name="',)
    closings = ("</function>",)
    tags_of_argument = ('<param name="{name}">', "</param>")
    excluded = ("</param>",)

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the tags."""
        return "<function name=" in template

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        before = rules.text(f'<function name="{tool.name}">')
        return f"{before} {cls.arguments_rule(tool, rules)} {rules.text('</function>')}"

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        name = yield from self.name()
        yield from self.expect('">')
        self.start_arguments(name)
        yield from self.space()
        while (yield from self.expect('<param name="', "</function>")) != "</function>":
            parameter = yield from self.until('">')
            yield from self.expect('">')
            yield from self.argument(parameter, self._value_ends)
            yield from self.space()
        self.end_arguments()

    def _value_ends(self) -> Step[bool]:
        if not (yield from self.surely_accept("</param>")):
            return False
        yield from self.space()
        return bool((yield from self.surely_follows("<param name=", "</function>")))
