"""The format of Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Collection

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class Llama3JsonParser(JsonCallParser):
    """A parser of `{"name": "f", "parameters": {"a": 1}}`. Several calls are separated by `; `.

    The calls are at the beginning of the answer or after `<|python_tag|>`. JSON anywhere else is content. vLLM calls
    this format `llama3_json`, and SGLang calls it `llama3`.
    """

    markers = ("<|python_tag|>",)
    openings = ("<|python_tag|>",)
    starts = ("{",)
    around = ("", "; ", "")
    arguments_key = "parameters"

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker, or asks for this format as Llama 3.2's template does."""
        return "<|python_tag|>" in template or '{"name": function name, "parameters":' in template

    def calls(self, opening: str) -> Step[None]:
        """Parse consecutive calls."""
        yield from self.space()
        while True:
            yield from self.call_object(known_keys=True)
            yield from self.space()
            yield from self.accept(";")
            yield from self.space()
            if not (yield from self.follows("{")):
                break
