"""The formats of Mistral: one for tokenizer versions up to 3, and one for versions from 11 on."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Collection

from mindie_mm.structured.lark import Rules, json_value
from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import NAME, Step
from mindie_mm.tool_calls.tool import Tool

_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralV3Parser(JsonCallParser):
    """A parser of `[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]`, the format of tokenizer versions up to 3.

    The format of version 11 is also accepted. Ids consist of 9 letters and digits, because the templates refuse all
    other ids. vLLM and SGLang call this format `mistral`.
    """

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)
    around = ("[TOOL_CALLS] [", ", ", "]")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker."""
        return "[TOOL_CALLS]" in template

    def call_id(self, name: str) -> str:
        """Return an id of 9 letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @classmethod
    def history_id(cls, call_id: str, name: str, number: int) -> str:
        """Return an id of 9 letters and digits. For the same `call_id`, the id is always the same."""
        if _ID.fullmatch(call_id):
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
            yield from self.object_call(name, call_id if _ID.fullmatch(call_id) else None)


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
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a rule that matches calls of a tool."""
        return f"{rules.text(f'[TOOL_CALLS]{tool.name}[ARGS]')} {json_value(tool.schema)}"

    @classmethod
    def written(cls, name: str, arguments: str) -> str | None:
        """Return a call as the model writes it."""
        return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
