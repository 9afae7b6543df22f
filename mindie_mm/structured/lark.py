"""Pieces of llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from llguidance import regex_to_lark

from mindie_mm.errors import InputError
from mindie_mm.structured.schema_numbers import with_exact_numbers

TEXT = "/(?s:.*)/"
"""Any text. llguidance keeps added tokens out of it."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The style of json.dumps. With flexible whitespace, a small model may write nothing but whitespace."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\b', re.DOTALL)
"""A literal, a comment, a regular expression or the beginning of a JSON schema."""
_decoder = json.JSONDecoder()


def literal(text: str) -> str:
    """Return a regular expression of `text`, or an empty literal."""
    characters = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
    return f"/{''.join(characters)}/" if text else '""'


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of the texts."""
    return " | ".join(map(literal, texts))


def token(token_id: int) -> str:
    """Return the reference to a token, which is not allowed in terminals."""
    return f"<[{token_id}]>"


def regex(pattern: str) -> str:
    """Return a regular expression in Lark's slashes.

    Raises:
        InputError: The expression ends within an escape, which llguidance would leave out.

    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InputError("the regular expression ends with a single backslash")
    return f"/{regex_to_lark(pattern, 'dw')}/" if pattern else '""'


def schema(text: str) -> dict[str, Any]:
    """Return the JSON schema in `text` with exact numbers and in the style of json.dumps.

    Raises:
        InputError: The text is not a schema in JSON, or has a number that llguidance would misread.

    """
    read = json.loads(with_exact_numbers(text))
    if not isinstance(read, dict):
        raise InputError("the JSON schema is not valid JSON: it is not an object")
    style = read.get("x-guidance", {})
    return {**read, "x-guidance": {**_STYLE, **style} if isinstance(style, dict) else style}


def with_exact_schemas(grammar: str) -> str:
    """Rewrite each `%json` of a Lark grammar as in `schema`. Raise its errors."""
    written, at = "", 0
    while found := _TOKEN.search(grammar, at):
        written += grammar[at : found.end()]
        at = found.end()
        if found[0] != "%json":
            continue
        begin = at + len(grammar[at:]) - len(grammar[at:].lstrip())
        try:
            _, end = _decoder.raw_decode(grammar, begin)
        except RecursionError as error:
            raise InputError("the grammar nests too deeply") from error
        except ValueError as error:
            raise InputError(f"the grammar has a %json that is not valid JSON: {error}") from error
        written += " " + json.dumps(schema(grammar[begin:end]))
        at = end
    return written + grammar[at:]
