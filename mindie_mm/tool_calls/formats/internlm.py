"""The format of InternLM2, and of InternVL models that are based on InternLM2."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class InternLMParser(JsonCallParser):
    r"""A parser of `<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>`.

    There may be whitespace between the first two markers. vLLM and SGLang call this format `internlm`.
    """

    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    openings = ("<|action_start|>",)
    closings = ("<|action_end|>",)
    around = ("", "\n", "")
    call_tags = ("<|action_start|><|plugin|>\n", "<|action_end|>")
    arguments_key = "parameters"

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker."""
        return "<|action_start|>" in template

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or several calls between one pair of markers."""
        yield from self.space()
        yield from self.expect("<|plugin|>")
        yield from self.space()
        yield from self.call_objects()
        yield from self.close("<|action_end|>")
