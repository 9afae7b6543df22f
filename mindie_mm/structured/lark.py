"""Writes grammars in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from mindie_mm.errors import InputError
from mindie_mm.structured.schema_text import rewritten

TEXT = "/(?s:.*)/"
"""Regular expression that matches any text. llguidance does not allow added tokens in this text."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The style of json.dumps. If whitespace were flexible, a small model might write only whitespace."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\b', re.DOTALL)
"""Pattern of a literal, a comment, a regular expression or the beginning of a JSON schema."""
_decoder = json.JSONDecoder()


def literal(text: str) -> str:
    """Return a regular expression that matches exactly `text`.

    If `text` is empty, return an empty string literal instead.
    """
    characters = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
    return f"/{''.join(characters)}/" if text else '""'


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of the texts."""
    return " | ".join(map(literal, texts))


def pieces_of(text: str, added: Mapping[str, int]) -> list[str]:
    """Split `text` into added tokens and the texts between them. `added` maps added tokens to their ids."""
    tokens = sorted((token for token in added if token and token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return [piece for piece in pieces if piece]


def token(*token_ids: int) -> str:
    """Return a reference to any of some tokens. Terminals must not contain such references."""
    return f"<[{','.join(map(str, token_ids))}]>"


def regex(pattern: str) -> str:
    """Return a regular expression between slashes, as Lark requires.

    Raises:
        InputError: The expression ends with an incomplete escape, which llguidance would ignore.

    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InputError("the regular expression ends with a single backslash")
    return f"/{regex_to_lark(pattern, 'dw')}/" if pattern else '""'


def schema(text: str) -> dict[str, Any]:
    """Parse and rewrite the JSON schema in `text`, and set the style of json.dumps.

    Raises:
        InputError: The text is not a schema in JSON, or has a number that llguidance would misread.

    """
    read = rewritten(text)
    if not isinstance(read, dict):
        raise InputError("the JSON schema is not a JSON object")
    style = read.get("x-guidance", {})
    return {**read, "x-guidance": {**_STYLE, **style} if isinstance(style, dict) else style}


def with_exact_schemas(grammar: str) -> str:
    """Rewrite each JSON schema (`%json`) in a Lark grammar as `schema` does. Raise the same errors."""
    written, at = "", 0
    while match := _TOKEN.search(grammar, at):
        written += grammar[at : match.end()]
        at = match.end()
        if match[0] != "%json":
            continue
        begin = at + len(grammar[at:]) - len(grammar[at:].lstrip())
        try:
            _, end = _decoder.raw_decode(grammar, begin)
        except RecursionError as error:
            raise InputError("the grammar is nested too deeply") from error
        except ValueError as error:
            raise InputError(f"the text after %json in the grammar is not valid JSON: {error}") from error
        written += " " + json.dumps(schema(grammar[begin:end]))
        at = end
    return written + grammar[at:]


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
            token(self._added[piece]) if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in pieces_of(text, self._added)
        )

    def raw_text(self, terms: Sequence[str], excluded: Sequence[str], closing: str) -> str:
        """Return a sequence that matches a raw text and the closing text after it.

        Args:
            terms: Terms of a terminal. The raw text matches all of them.
            excluded: Texts that the raw text must not contain, because they would end it.
            closing: Text after the raw text.

        """
        first, *others = pieces_of(closing, self._added)
        if first in self._added:
            first, others = "", [first, *others]
        if literals := [text for text in excluded if text not in self._added]:
            terms = [*terms, f"~({TEXT} ({any_of(literals)}) {TEXT})"]
        terminal = self.add("TEXT", " & ".join(terms))
        if first:
            terminal = self.add("CLOSED", f"{terminal} {json.dumps(first, ensure_ascii=False)}")
        return " ".join([terminal, *filter(None, [self.text("".join(others))])])

    def one_of(self, alternatives: Sequence[str]) -> str:
        """Return the right side of a rule that matches any of the alternatives. Nothing matches if there are none."""
        return " | ".join(dict.fromkeys(alternatives)) or self.add("NEVER", "/a/ & /b/")


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


def any_text(added_tokens: Sequence[int]) -> str:
    """Return a grammar that matches any text, with any of the given added tokens in it."""
    if not added_tokens:
        return f"start: {TEXT}"
    return f"start: other{{0,}} TEXT\nother: TEXT {token(*added_tokens)}\nTEXT: {TEXT}"


def or_json(grammar: str, schema: Mapping[str, Any]) -> str:
    """Return a grammar that matches the outputs of `grammar` and the JSON values of `schema`.

    `grammar` defines neither of the rules `called` and `content`.
    """
    called = re.sub(r"^start: ", "called: ", grammar, flags=re.MULTILINE)
    return f"{called}start: called | content\ncontent: {json_value(schema)}\n"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the right side of a rule that matches the JSON values of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}"
