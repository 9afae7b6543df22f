"""Pieces of grammars in the Lark of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_CALLS = 8
"""Maximum number of calls in a forced answer. Without a limit, a small model repeats its call until max_tokens."""

# The style of json.dumps. With flexible whitespace, a small model may write nothing but whitespace.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def literal(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return a sequence that matches `text`. Added tokens within it become tokens."""
    if not text:
        return '""'
    longest_first = sorted((token for token in added_tokens if token and token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
    return " ".join(
        f"<[{added_tokens[piece]}]>" if piece in added_tokens else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def json_value(schema: Mapping[str, Any]) -> str:
    """Return a rule's right side that matches the JSON values of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}"


def repeated(rule: str, separator: str, *, parallel: bool) -> str:
    """Return a sequence of one `rule`, or of several with a separator between them."""
    return f"{rule} ({separator} {rule}){{0,{MAX_CALLS - 1}}}" if parallel else rule
