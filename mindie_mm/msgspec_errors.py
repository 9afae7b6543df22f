"""Messages for msgspec's errors about invalid JSON and wrong types, in the same style as this project's messages."""

from __future__ import annotations

import re

import msgspec

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`(?P<part>key|\.\.\.)` in )?`\$\.?(?P<where>.*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]*)`(?:, got `(?P<got>[^`]*)`)?")
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>[^`]*)`")
_BYTE = re.compile(r"\(byte (?P<number>\d+)\)")
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_GOT = {"float": "a number with a fraction"}
"""Descriptions of types for the value that was given, if they differ from `_TYPES`."""


def in_words(error: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """Describe an error, without the invalid value and without a period at the end."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if not isinstance(error, msgspec.ValidationError):
        at = _BYTE.search(str(error))
        return f"byte {at['number']} is not valid JSON" if at else "the JSON is incomplete"
    place = _PLACE.fullmatch(str(error))
    assert place is not None
    where = place["where"] or "the value"
    if place["part"] == "key":
        where = f"a key of {where}"
    if field := _FIELD.fullmatch(place["what"]):
        return (
            f"{where} {'lacks the field' if field['what'].startswith('missing') else 'has the unknown field'} "
            f"{field['name']!r}"
        )
    if expected := _EXPECTED.fullmatch(place["what"]):
        got = f", not {_GOT.get(expected['got']) or _type_in_words(expected['got'])}" if expected["got"] else ""
        return f"{where} must be {_type_in_words(expected['wanted'])}{got}"
    if place["what"].startswith("Invalid enum value"):
        return f"{where} is not one of the allowed values"
    return f"{where} is outside its range"


def _type_in_words(names: str) -> str:
    """Describe the types of a union. Leave out null unless it is the only type."""
    parts = names.split(" | ")
    return " or ".join(_TYPES.get(name, f"of type {name}") for name in parts if name != "null" or len(parts) == 1)
