"""The formats of DeepSeek-V3 and R1, and of DeepSeek-V3.1."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from mindie_mm.structured.lark import Rules, json_value
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import NoMatch, Step
from mindie_mm.tool_calls.tool import Tool

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"<｜tool▁sep｜>.{0,80}?```json", re.DOTALL)


class DeepSeekV3Parser(ToolCallParser):
    r"""A parser of calls between markers. The arguments are in a fenced block.

    A call consists of `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, a newline, a fenced block of JSON and
    `<｜tool▁call▁end｜>`. The calls are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. The format of
    DeepSeek-V3.1 is also accepted. vLLM calls this format `deepseek_v3`, and SGLang calls it `deepseekv3`.
    """

    markers = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    openings = (_BEGIN,)
    closings = (_END,)
    around = (_BEGIN, "\n", _END)
    call_tags: ClassVar[tuple[str, str]] = (f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n", f"\n```{_CALL_END}")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the markers, and a fenced block after the separator."""
        return _BEGIN in template and bool(_FENCED.search(template))

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        before, after = cls.call_tags
        return f"{rules.text(before.replace('{name}', tool.name))} {json_value(tool.schema)} {rules.text(after)}"

    def calls(self, opening: str) -> Step[None]:
        """Parse the calls up to the end marker."""
        yield from self.space()
        while (yield from self.expect(_CALL, _END)) == _CALL:
            name = yield from self.until(_SEPARATOR)
            yield from self.expect(_SEPARATOR)
            yield from self.space()
            fenced = not (yield from self.follows("{", _CALL_END))
            if fenced:
                name = yield from self.until("\n", "```")
                yield from self.space()
                yield from self.expect("```json", "```")
            if not name.strip():
                raise NoMatch
            yield from self.object_call(name.strip(), ends=("```", _CALL_END))
            if fenced:
                yield from self.close("```")
            yield from self.close(_CALL_END)
            yield from self.space()
        self.taken()


class DeepSeekV31Parser(DeepSeekV3Parser):
    """A parser of `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`.

    The markers around the calls are the same as in DeepSeek-V3. vLLM calls this format `deepseek_v31`, and SGLang calls
    it `deepseekv31`.
    """

    around = (_BEGIN, "", _END)
    call_tags = (f"{_CALL}{{name}}{_SEPARATOR}", _CALL_END)

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the markers."""
        return _BEGIN in template
