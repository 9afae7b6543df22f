"""The format of Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Collection

from mindie_mm.structured.lark import Rules, json_value
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import NoMatch, Step
from mindie_mm.tool_calls.tool import Tool

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiK2Parser(ToolCallParser):
    """A parser of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`.

    The calls are between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. `functions.f:0` is the id of
    the call. Its number counts all earlier calls of the chat. Earlier messages must also have ids in this format. vLLM
    and SGLang call this format `kimi_k2`.
    """

    markers = (_BEGIN, _END, _CALL, _ARGUMENTS, _CALL_END)
    openings = (_BEGIN,)
    closings = (_END,)
    around = (_BEGIN, "", _END)

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the markers."""
        return _BEGIN in template

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        number = rules.add("NUMBER", "/[0-9]{1,4}/")
        before, separator, after = map(rules.text, (f"{_CALL}functions.{tool.name}:", _ARGUMENTS, _CALL_END))
        return f"{before} {number} {separator} {json_value(tool.schema)} {after}"

    def call_id(self, name: str) -> str:
        """Return an id that contains the number of the call in the chat."""
        return f"functions.{name}:{self.num_earlier_calls + self.num_calls}"

    @classmethod
    def history_id(cls, call_id: str, name: str, number: int) -> str:
        """Return an id that contains the number of the call in the chat."""
        return f"functions.{name}:{number}"

    def calls(self, opening: str) -> Step[None]:
        """Parse the calls of a section. Other text in the section is dropped."""
        while True:
            yield from self.until(_CALL, _END)
            if (yield from self.accept(_END)):
                self.taken()
                return
            yield from self.expect(_CALL)
            call_id = (yield from self.until(_ARGUMENTS)).strip()
            yield from self.expect(_ARGUMENTS)
            match = _ID.fullmatch(call_id)
            if not match:
                raise NoMatch
            is_id = call_id.startswith("functions.") and ":" in call_id
            yield from self.object_call(match[1], call_id if is_id else None, ends=(_CALL_END,))
            yield from self.close(_CALL_END)
