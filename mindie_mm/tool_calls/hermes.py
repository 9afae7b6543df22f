"""The format of Hermes, Qwen2.5, Qwen3 and Qwen3-VL."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.lark import json_value, literal, repeated
from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.tool import Tool


class HermesParser(JsonCallParser):
    r"""A parser of `<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>`.

    A call ends where its JSON ends, so that arguments may contain the markers. Named `hermes` in vLLM, `qwen25` in
    SGLang.
    """

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template writes the marker."""
        return "<tool_call>" in template

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], *, parallel: bool, one_of: Sequence[str], added_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar of calls, each on lines of its own."""
        rules = []
        for tool in tools:
            if tool.name in one_of:
                before = f'<tool_call>\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
                after = literal("}\n</tool_call>", added_tokens)
                rules.append(f"{literal(before, added_tokens)} {json_value(tool.schema)} {after}")
        separator = literal("\n", added_tokens)
        return f"start: {repeated('call', separator, parallel=parallel)}\ncall: {' | '.join(rules)}\n"

    def calls(self, opening: str) -> Step[None]:
        """Read one call."""
        yield from self.space()
        yield from self.call_object()
        yield from self.close("</tool_call>")
