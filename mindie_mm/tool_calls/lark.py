"""Writes grammars of tool calls in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.raw_strings import excluding, string_terms

MAX_CALLS = 8
"""Maximum number of calls that a grammar allows. Without a limit, small models may repeat a call until max_tokens."""

# JSON must be written as json.dumps writes it. If whitespace were flexible, a small model might write only whitespace.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Rules:
    """The rules that a grammar contains so far."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        """Create an empty grammar. `added_tokens` maps added tokens, which literals do not match, to their ids."""
        self._added = {token: number for token, number in added_tokens.items() if token}
        self._lines: dict[str, str] = {}

    def __str__(self) -> str:
        """Return the grammar."""
        return "".join(f"{name}: {body}\n" for name, body in self._lines.items())

    def add(self, name: str, body: str) -> str:
        """Add a rule, or a terminal if the name is in capitals. Return its name.

        If another rule already has this name, a number is appended.
        """
        unique, number = name, 1
        while unique in self._lines and self._lines[unique] != body:
            number += 1
            unique = f"{name}{number:X}" if name.isupper() else f"{name}{number}"
        self._lines[unique] = body
        return unique

    def text(self, text: str) -> str:
        """Return a sequence that matches `text`. Added tokens in `text` are matched as tokens.

        If two texts are allowed at the same position, neither may begin with the other, because the longer literal
        takes precedence.
        """
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in self._pieces(text)
        )

    def raw(
        self, schema: Mapping[str, Any], closing: str, excluded: Sequence[str], other_types: Collection[str] = ()
    ) -> str:
        """Return a sequence that matches a string of a schema, without quotes, and the closing text after the string.

        Args:
            schema: Schema of the string.
            closing: Text after the string.
            excluded: Texts that must not occur in the string, because they would end it.
            other_types: Same as in `string_terms`.

        Raises:
            InputError: A value that the schema lists contains one of the excluded texts.

        """
        for value in schema.get("enum", ()):
            if any(text in value for text in excluded):
                raise InputError(f"a parameter has the value {value!r}, which this tool-call format cannot write")
        first, *others = self._pieces(closing)
        if first in self._added:
            first, others = "", [first, *others]
        excluded = [text for text in excluded if text not in self._added]
        terms = string_terms(schema, other_types)
        if excluded:
            terms.append(excluding(excluded))
        terminal = self.add("TEXT", " & ".join(terms))
        if first:
            terminal = self.add("CLOSED", f"{terminal} {json.dumps(first, ensure_ascii=False)}")
        return " ".join([terminal, *filter(None, [self.text("".join(others))])])

    def any_of(self, alternatives: Sequence[str]) -> str:
        """Return the right side of a rule that matches any of the alternatives. Nothing matches if there are none."""
        return " | ".join(dict.fromkeys(alternatives)) or self.add("NEVER", "/a/ & /b/")

    def _pieces(self, text: str) -> list[str]:
        tokens = sorted((token for token in self._added if token in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [piece for piece in pieces if piece]


def separated(items: Sequence[tuple[str, bool]], separator: str, rules: Rules) -> str:
    """Return a sequence that matches rules in the given order, with a separator between them.

    Each item consists of a rule and a flag that says whether the rule is required.
    """
    first = rest = '""'
    for rule, is_required in reversed(items):
        option = "" if is_required else "?"
        first = rules.add("first", f"{rule} {rest}" + ("" if is_required else f" | {first}"))
        rest = rules.add("rest", f"({separator} {rule}){option} {rest}")
    return first


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the right side of a rule that matches the JSON values of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}"
