"""The format of Phi-4-mini and Phi-4-multimodal."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class Phi4Parser(JsonCallParser):
    """A parser of `functools[{"name": "f", "arguments": {"a": 1}}]`.

    The model may write `<|tool_call|>` or `<|tool_calls|>` instead of `functools`. vLLM calls this format
    `phi4_mini_json`.
    """

    markers = ("<|tool_call|>", "<|/tool_call|>", "<|tool_calls|>", "<|/tool_calls|>")
    openings = ("functools[", "<|tool_call|>", "<|tool_calls|>")
    around = ("functools[", ", ", "]")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template asks for this format, or contains the markers that Phi puts around the tools."""
        return "functools[" in template or ("<|tool|>" in template and "<|/tool|>" in template)

    def calls(self, opening: str) -> Step[None]:
        """Parse a list of calls."""
        yield from self.space()
        if not opening.endswith("["):
            yield from self.expect("[")
        yield from self.call_list()
        yield from self.close("<|/tool_call|>", "<|/tool_calls|>")
