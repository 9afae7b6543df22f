"""The formats of Granite 3 and of Granite-20B-FunctionCalling."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class GraniteParser(JsonCallParser):
    """A parser of `<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]`.

    Granite 3.1 may write `<tool_call>` instead of the marker. The brackets may be missing around a single call. vLLM
    calls this format `granite`. Granite 4 uses the format of Hermes.
    """

    markers = ("<|tool_call|>", "<tool_call>")
    openings = ("<|tool_call|>", "<tool_call>")
    around = ("<|tool_call|>[", ", ", "]")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker."""
        return "<|tool_call|>" in template

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or a list of calls."""
        yield from self.space()
        yield from self.call_objects()


class Granite20bFcParser(JsonCallParser):
    """A parser of `<function_call> {"name": "f", "arguments": {"a": 1}}`. vLLM calls this format `granite-20b-fc`."""

    markers = ("<function_call>",)
    openings = ("<function_call>",)
    around = ("", "\n", "")
    call_tags = ("<function_call> ", "")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker."""
        return "<function_call>" in template

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or several calls between one pair of markers."""
        yield from self.space()
        yield from self.call_objects()
