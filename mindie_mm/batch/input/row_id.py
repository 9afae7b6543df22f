"""The id of a row in the input."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from mindie_mm.batch.input.record import Files, Record, number_of
from mindie_mm.batch.input.request import is_route
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.errors import InputError

_EXACT = 2**53
"""Above this absolute value, a float may represent several integers."""


class _Named(msgspec.Struct):
    id: Any = None
    custom_id: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


def row_id(record: Record) -> str | None:
    """Return the id of a row in the input, or None if there is no id.

    Even if a row is not valid JSON, its id is returned if the id can be read. Unpaired surrogates in an id are escaped.
    """
    if isinstance(record, Files):
        described = record.own(".json")
        return (row_id(described) if described is not None else None) or printable(record.key)
    try:
        if isinstance(record, bytes):
            named = msgspec.json.decode(record, type=_Named)
            has_body = bytes(named.body).startswith(b"{")
        else:
            named = _Named(record.get("id"), record.get("custom_id"), record.get("url"))
            has_body = isinstance(record.get("body"), Mapping)
        is_line = isinstance(named.custom_id, str) and (has_body or is_route(named.url))
        return id_text(named.custom_id if is_line or named.id is None else named.id)
    except InputError:
        return None
    except (*NOT_JSON, RecursionError):
        return _damaged_id(record) if isinstance(record, bytes) else None


def _damaged_id(record: bytes) -> str | None:
    """Return the `id` of an object that contains NaN or text that is not Unicode. Python's decoder accepts both."""
    try:
        value = json.loads(record.decode(errors="surrogateescape"))
        row_id = id_text(value.get("id")) if isinstance(value, dict) else None
    except (ValueError, RecursionError, InputError):
        return None
    return None if row_id is None else printable(row_id)


def id_text(value: Any) -> str | None:
    """Return the value of a row's `id` as a string, or None if it is missing.

    Integers may be given as floats or decimals. If integers are missing in a column, pandas turns the column into
    floats with NaN. Databases export integers as decimals.

    Raises:
        InputError: The id is neither a string nor an integer.

    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    number = number_of(value) if isinstance(value, Decimal) else value
    if isinstance(number, float) and number.is_integer() and abs(number) <= _EXACT:
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, str | int | UUID):
        raise InputError(
            f"the row's id is {type(value).__name__}; it must be a string or an integer. In a table, cast the "
            "column to one of these types"
        )
    return str(number)


def printable(text: str) -> str:
    """Escape the parts of a string that are not Unicode, such as bytes of a file name. Tables require Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()
