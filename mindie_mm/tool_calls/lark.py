"""Writes grammars of tool calls in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.schemas import keyword

MAX_CALLS = 8
"""Maximum number of calls that a grammar allows. Without a limit, small models may repeat a call until max_tokens."""

# JSON must be written as json.dumps writes it. If whitespace were flexible, a small model might write only whitespace.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"(.|\n)*"
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)+",
    "uri": r"[a-z][a-z0-9+.-]*:\/\/[a-zA-Z0-9.-]+(\/[a-zA-Z0-9._~?&=+\/-]*)?",
}
_ASCII_CLASSES = {"d": "[0-9]", "w": "[a-zA-Z0-9_]"}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


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

    def raw(self, schema: Mapping[str, Any], closing: str, excluded: Sequence[str]) -> str:
        """Return a sequence that matches a string of a schema, without quotes, and the closing text after the string.

        Args:
            schema: Schema of the string.
            closing: Text after the string.
            excluded: Texts that must not occur in the string, because they would end it.

        """
        first, *others = self._pieces(closing)
        if first in self._added:
            first, others = "", [first, *others]
        excluded = [text for text in excluded if text not in self._added]
        terms = [f"/{_regex(term)}/" for term in _string_terms(schema)]
        if excluded:
            terms.append(f"~/{_regex(_ANY_TEXT + '(' + '|'.join(map(re.escape, excluded)) + ')' + _ANY_TEXT)}/")
        terminal = self.add("TEXT", " & ".join(terms))
        if first:
            terminal = self.add("CLOSED", f"{terminal} {json.dumps(first, ensure_ascii=False)}")
        return " ".join([terminal, *filter(None, [self.text("".join(others))])])

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


def _string_terms(schema: Mapping[str, Any]) -> list[str]:
    """Return regular expressions, all of which a string of the schema must match."""
    low, high = (keyword(schema, name, int, "a string") for name in ("minLength", "maxLength"))
    terms = [f"(.|\\n){{{low or 0},{'' if high is None else high}}}" if low or high is not None else _ANY_TEXT]
    if (name := keyword(schema, "format", str, "a string")) is not None:
        if name not in _FORMATS:
            raise InputError(f"this tool-call format cannot enforce strings of format {name!r}")
        terms.append(_FORMATS[name])
    if (expression := keyword(schema, "pattern", str, "a string")) is not None:
        for letter, meaning in _ASCII_CLASSES.items():  # these classes are Unicode in Rust, but ASCII in JSON Schema
            expression = re.sub(rf"(?<!\\)\\{letter}", meaning, expression)
        before = "" if expression.startswith("^") else _ANY_TEXT
        after = "" if expression.endswith("$") and not expression.endswith("\\$") else _ANY_TEXT
        inner = expression.removeprefix("^") if not before else expression
        terms.append(f"{before}({inner.removesuffix('$') if not after else inner}){after}")
    return terms


def _regex(expression: str) -> str:
    """Escape a regular expression, so that it can be put between slashes in Lark."""
    return re.sub(r"(?<!\\)/", r"\\/", expression).replace("\n", "\\n")
