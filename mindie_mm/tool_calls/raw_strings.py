"""Describes the strings that a JSON schema allows, for formats in which strings are not JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.structured import lark
from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.schemas import keyword

_ANY = "(?s:.*)"
_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        f"::({_GROUP}(:{_GROUP}){{0,6}})?",
        *(f"{_GROUP}(:{_GROUP}){{0,{n - 1}}}::({_GROUP}(:{_GROUP}){{0,{6 - n}}})?" for n in range(1, 7)),
        f"({_GROUP}:){{7}}:",
    ]
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_NAMED = r"[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2}"
_IN_PATH = f"({_NAMED}|[:@])"
_AUTHORITY = rf"(({_NAMED}|:)*@)?(\[({_IPV6})\]|({_NAMED})*)(:[0-9]*)?"
_PATH = f"(//{_AUTHORITY}(/{_IN_PATH}*)*|/({_IN_PATH}+(/{_IN_PATH}*)*)?|{_IN_PATH}+(/{_IN_PATH}*)*)?"
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_PATH}(\?({_IN_PATH}|[/?])*)?(#({_IN_PATH}|[/?])*)?",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "unknown": _ANY,
}
"""Regular expressions of the formats that llguidance enforces in JSON (RFC 3339, 5321, 1123, 4291, 3986 and 9562)."""

_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_JSON_TEXTS: Mapping[str, str] = {
    "null": "null",
    "boolean": "true|false",
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": rf"\[{_ANY}",
    "object": rf"\{{{_ANY}",
}
"""Regular expressions of the texts that are read as JSON of a type, or that begin like such texts."""


def raw_string(
    rules: Rules, schema: Mapping[str, Any], closing: str, excluded: Sequence[str], other_types: Collection[str] = ()
) -> str:
    """Return a sequence that matches a string of a schema, without quotes, and the closing text after the string.

    Args:
        rules: Grammar that needs the sequence. Terminals are added to it.
        schema: Schema of the string. `enum`, `minLength`, `maxLength`, `format` and `pattern` are read.
        closing: Text after the string.
        excluded: Texts that must not occur in the string, because they would end it.
        other_types: JSON types that are also allowed in place of the string. Texts that would be read as a value of
            one of these types are excluded.

    Raises:
        InputError: The schema is invalid, has an unknown format, or lists a value with one of the excluded texts.

    """
    for value in schema.get("enum", ()):
        if any(text in value for text in excluded):
            raise InputError(f"a parameter has the value {value!r}, which this tool-call format cannot write")
    return rules.raw_text(_terms(schema, other_types), excluded, closing)


def _terms(schema: Mapping[str, Any], other_types: Collection[str]) -> list[str]:
    """Return the terms of a Lark terminal. A string of the schema matches all of them."""
    low, high = (keyword(schema, name, int, "a string") for name in ("minLength", "maxLength"))
    expressions = [f"(?s:.){{{low},}}"] if low else []
    expressions += [] if high is None else [f"(?s:.){{0,{high}}}"]
    if (name := keyword(schema, "format", str, "a string")) is not None:
        if name not in _FORMATS:
            raise InputError(f"this tool-call format cannot enforce strings of format {name!r}")
        expressions.append(_FORMATS[name])
    if (pattern := keyword(schema, "pattern", str, "a string")) is not None:
        expressions.append(_searched(pattern))
    terms = [lark.regex(expression) for expression in expressions or [_ANY]]
    if (values := schema.get("enum")) is not None:
        terms.append(f"({lark.any_of(values)})")
    if texts := [_JSON_TEXTS[kind] for kind in sorted(other_types) if kind in _JSON_TEXTS]:
        terms.append("~" + lark.regex(rf"[\s\x1c-\x1f]*({'|'.join(texts)})[\s\x1c-\x1f]*"))
    return terms


def _searched(pattern: str) -> str:
    """Return an expression for the whole strings in which a pattern of JSON Schema is found."""
    found = []
    for part in _alternatives(pattern):
        before = "" if part.startswith("^") else _ANY
        is_anchored = part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2
        after = "" if is_anchored else _ANY
        found.append(f"{before}({part[not before : -1 if is_anchored else None]}){after}")
    return "|".join(found)


def _alternatives(pattern: str) -> Iterator[str]:
    """Split a pattern at each `|` outside groups and character classes."""
    start = depth = 0
    in_class = False
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            yield pattern[start:at]
            start = at + 1
        at += 1
    yield pattern[start:]
