"""Writes pieces of grammars in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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


def token(token_id: int) -> str:
    """Return a reference to a token. Terminals must not contain such references."""
    return f"<[{token_id}]>"


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
