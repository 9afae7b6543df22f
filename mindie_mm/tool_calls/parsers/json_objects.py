"""Formats in which a call is a JSON object with a name and arguments. They differ in the texts around the calls."""

from __future__ import annotations

from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import Step


class HermesParser(JsonCallParser):
    r"""A parser of `<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>`.

    A call ends where its JSON ends, so arguments may contain the markers. vLLM calls this format `hermes`, and SGLang
    calls it `qwen25`.
    """

    in_templates = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    around = ("", "\n", "")
    call_tags = ('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>")
    after_calls = ("</tool_call>", "}\n</tool_call>", "}</tool_call>")  # small models write an extra brace


class InternLMParser(JsonCallParser):
    r"""A parser of `<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>`.

    There may be whitespace between the first two markers. vLLM and SGLang call this format `internlm`.
    """

    in_templates = ("<|action_start|>",)
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    openings = ("<|action_start|>",)
    closings = ("<|action_end|>",)
    around = ("", "\n", "")
    call_tags = ('<|action_start|><|plugin|>\n{"name": {name}, "parameters": ', "}<|action_end|>")
    after_opening = "<|plugin|>"
    after_calls = closings


class Phi4Parser(JsonCallParser):
    """A parser of `functools[{"name": "f", "arguments": {"a": 1}}]`.

    The model may write `<|tool_call|>` or `<|tool_calls|>` instead of `functools`. vLLM calls this format
    `phi4_mini_json`.
    """

    in_templates = ("functools[", "<|/tool|>")  # Phi-4 puts the tools between <|tool|> and <|/tool|>
    markers = ("<|tool_call|>", "<|/tool_call|>", "<|tool_calls|>", "<|/tool_calls|>")
    openings = ("functools[", "<|tool_call|>", "<|tool_calls|>")
    around = ("functools[", ", ", "]")
    after_calls = ("<|/tool_call|>", "<|/tool_calls|>")


class GraniteParser(JsonCallParser):
    """A parser of `<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]`.

    Granite 3.1 may write `<tool_call>` instead of the marker. The brackets may be missing around a single call. vLLM
    calls this format `granite`. Granite 4 uses the format of Hermes.
    """

    in_templates = ("<|tool_call|>",)
    markers = ("<|tool_call|>", "<tool_call>")
    openings = ("<|tool_call|>", "<tool_call>")
    around = ("<|tool_call|>[", ", ", "]")


class Granite20bFcParser(JsonCallParser):
    """A parser of `<function_call> {"name": "f", "arguments": {"a": 1}}`. vLLM calls this format `granite-20b-fc`."""

    in_templates = ("<function_call>",)
    markers = ("<function_call>",)
    openings = ("<function_call>",)
    around = ("", "\n", "")
    call_tags = ('<function_call> {"name": {name}, "arguments": ', "}")


class Llama3JsonParser(JsonCallParser):
    """A parser of `{"name": "f", "parameters": {"a": 1}}`. Several calls are separated by `; `.

    The calls are at the beginning of the answer or after `<|python_tag|>`. JSON anywhere else is content. vLLM calls
    this format `llama3_json`, and SGLang calls it `llama3`.
    """

    in_templates = ("<|python_tag|>", '{"name": function name, "parameters":')
    markers = ("<|python_tag|>",)
    openings = ("<|python_tag|>",)
    starts = ("{",)
    around = ("", "; ", "")
    call_tags = ('{"name": {name}, "parameters": ', "}")

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
