"""Checks of input values. The argument `where` is the name of the value in error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.settings.limits import python_number


def require_list(value: Any, where: str) -> None:
    """Raise InputError unless `value` is a list or tuple with at least one element."""
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{where} is {type_of(value)}; it must be a list of dicts")
    if not value:
        raise InputError(f"{where} is an empty list; it must have at least one dict")


def require_dict(value: Any, where: str) -> None:
    """Raise InputError unless `value` is a mapping."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {type_of(value)}; it must be a dict")


def require_unicode(text: str, where: str) -> str:
    """Return `text`. Raise InputError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} contains a lone surrogate at character {error.start}") from None
    return text


def require_switches(**given: bool) -> None:
    """Raise InputError unless all arguments are True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} is {type_of(value)}; it must be True or False")


def whole(value: Any) -> Any:
    """Convert a float without a fraction, such as JSON's 16.0, to an integer of at most 64 bits.

    Convert other numbers as in `python_number`, and return any other value unchanged.
    """
    value = python_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**64 else value


def shown(number: float) -> str:
    """Return a number as text for an error message. By default, Python cannot print integers of thousands of digits."""
    if isinstance(number, int) and number.bit_length() > 256:
        return f"<integer of {number.bit_length()} bits>"
    return str(number)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun for a message, such as `1 row` or `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def type_of(value: Any) -> str:
    """Describe the type of a value for an error message."""
    return "missing" if value is None else f"of type {type(value).__name__}"
