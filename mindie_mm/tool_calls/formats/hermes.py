"""The format of Hermes, Qwen2.5, Qwen3 and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class HermesParser(JsonCallParser):
    r"""A parser of `<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>`.

    A call ends where its JSON ends, so arguments may contain the markers. vLLM calls this format `hermes`, and SGLang
    calls it `qwen25`.
    """

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    around = ("", "\n", "")
    call_tags = ("<tool_call>\n", "\n</tool_call>")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker."""
        return "<tool_call>" in template

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or several calls between one pair of markers."""
        yield from self.space()
        yield from self.call_objects()
        yield from self.close("</tool_call>", "}\n</tool_call>", "}</tool_call>")  # small models write an extra brace
