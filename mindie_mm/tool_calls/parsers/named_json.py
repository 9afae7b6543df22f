"""Formats in which the name of a tool stands before the arguments, which are JSON."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Collection

from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import NAME, NoMatch, Step
from mindie_mm.tool_calls.schemas import Tool

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"<｜tool▁sep｜>.{0,80}?```json", re.DOTALL)

_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_KIMI_CALL_END = "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class MistralV3Parser(JsonCallParser):
    """A parser of `[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]`, the format of tokenizer versions up to 3.

    The format of version 11 is also accepted. Ids consist of 9 letters and digits, because the templates refuse all
    other ids. vLLM and SGLang call this format `mistral`.
    """

    in_templates = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)
    around = ("[TOOL_CALLS] [", ", ", "]")

    def call_id(self, name: str) -> str:
        """Return an id of 9 letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @classmethod
    def history_id(cls, call_id: str, name: str, number: int) -> str:
        """Return an id of 9 letters and digits. For the same `call_id`, the id is always the same."""
        if _MISTRAL_ID.fullmatch(call_id):
            return call_id
        return hashlib.blake2b((call_id or str(number)).encode(errors="replace"), digest_size=8).hexdigest()[:9]

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or a list of calls."""
        yield from self.space()
        if (yield from self.follows("[", "{")):
            yield from self.call_objects()
        else:
            name = yield from self.name()
            yield from self.space()
            call_id = ""
            if (yield from self.accept("[CALL_ID]")):
                call_id = (yield from self.until("[ARGS]")).strip()
            if not (yield from self.follows("{")):
                yield from self.expect("[ARGS]")
            yield from self.object_call(name, call_id if _MISTRAL_ID.fullmatch(call_id) else None)


class MistralParser(MistralV3Parser):
    """A parser of `[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}`, the format of tokenizer versions from 11 on.

    `[CALL_ID]` and an id may precede `[ARGS]`.
    """

    around = ("", "", "")
    tool_names = NAME

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains `[TOOL_CALLS]`, and the vocabulary contains `[ARGS]`."""
        return "[TOOL_CALLS]" in template and "[ARGS]" in vocabulary

    @classmethod
    def tags_of(cls, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""
        return f"[TOOL_CALLS]{name}[ARGS]", ""


class DeepSeekV31Parser(ToolCallParser):
    """A parser of `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`.

    The calls are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. The format of DeepSeek-V3 is also
    accepted. vLLM calls this format `deepseek_v31`, and SGLang calls it `deepseekv31`.
    """

    in_templates = (_BEGIN,)
    markers = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    openings = (_BEGIN,)
    closings = (_END,)
    around = (_BEGIN, "", _END)
    call_tags = (f"{_CALL}{{name}}{_SEPARATOR}", _CALL_END)

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


class DeepSeekV3Parser(DeepSeekV31Parser):
    r"""A parser of calls between markers. The arguments are in a fenced block.

    A call consists of `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, a newline, a fenced block of JSON and
    `<｜tool▁call▁end｜>`. The markers around the calls are those of DeepSeek-V3.1. vLLM calls this format
    `deepseek_v3`, and SGLang calls it `deepseekv3`.
    """

    around = (_BEGIN, "\n", _END)
    call_tags = (f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n", f"\n```{_CALL_END}")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the markers, and a fenced block after the separator."""
        return super().detects(template, vocabulary) and bool(_FENCED.search(template))


class KimiK2Parser(ToolCallParser):
    """A parser of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`.

    The calls are between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. `functions.f:0` is the id of
    the call. Its number counts all earlier calls of the chat. Earlier messages must also have ids in this format. vLLM
    and SGLang call this format `kimi_k2`.
    """

    in_templates = (_KIMI_BEGIN,)
    markers = (_KIMI_BEGIN, _KIMI_END, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END)
    openings = (_KIMI_BEGIN,)
    closings = (_KIMI_END,)
    around = (_KIMI_BEGIN, "", _KIMI_END)

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls to a tool."""
        number = rules.add("NUMBER", "/[0-9]{1,4}/")
        before, separator, after = map(
            rules.text, (f"{_KIMI_CALL}functions.{tool.name}:", _KIMI_ARGUMENTS, _KIMI_CALL_END)
        )
        return f"{before} {number} {separator} {cls.arguments_rule(tool, rules)} {after}"

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
            yield from self.until(_KIMI_CALL, _KIMI_END)
            if (yield from self.accept(_KIMI_END)):
                self.taken()
                return
            yield from self.expect(_KIMI_CALL)
            call_id = (yield from self.until(_KIMI_ARGUMENTS)).strip()
            yield from self.expect(_KIMI_ARGUMENTS)
            match = _KIMI_ID.fullmatch(call_id)
            if not match:
                raise NoMatch
            is_id = call_id.startswith("functions.") and ":" in call_id
            yield from self.object_call(match[1], call_id if is_id else None, ends=(_KIMI_CALL_END,))
            yield from self.close(_KIMI_CALL_END)
