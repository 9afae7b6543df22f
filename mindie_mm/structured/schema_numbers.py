"""Rewrites numbers in JSON schemas.

llguidance reads numbers as float64, which may change large values. It also allows an excluded integer if the other
bound is less than 1 farther from zero: 0 in `{"exclusiveMinimum": 0, "maximum": 0.5}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeGuard

from mindie_mm.errors import InputError
from mindie_mm.inputs import shown

_EXACT = 2**53
"""Float64 represents all integers up to this value exactly."""
_INT64_MAX = 2**63 - 1
_LARGEST = 2**63 - 1024
"""Largest float64 that fits in an int64. llguidance computes ranges in int64, and negates their bounds."""
_MOST = 2**31 - 1
"""Replacement for larger maximum lengths, which no answer can reach."""
_MAX_DIVISOR = 2**32 // 10
"""Largest supported value of multipleOf. llguidance divides digit by digit in 32 bits."""
_NINETEEN_DIGITS = 10**18
_NUM_DIGITS = 15
"""Number of digits of a number next to an excluded integer. llguidance reads this many digits exactly."""
_SMALLEST = 1e-64
"""Number next to an excluded zero. llguidance cannot read a bound with many more decimal places."""

_LEAST_LENGTHS = ("minLength", "minItems", "minProperties")
_MOST_LENGTHS = ("maxLength", "maxItems", "maxProperties")


def rewrite_numbers(schema: dict[str, Any]) -> None:
    """Rewrite the numbers of a JSON schema in place, without the numbers of the schemas inside it.

    A bound above 2**53 is moved inward to the next float64, so that every answer satisfies the original bound. An
    excluded integer bound is replaced by an inclusive bound slightly beyond it. A maximum length that no answer can
    reach is reduced.

    Raises:
        InputError: The schema contains a number that llguidance would misread.

    """
    for key in ("const", "enum"):
        if key in schema:
            _require_exact(schema[key], key)
    _rewrite_bounds(schema)
    _rewrite_lengths(schema)
    if _is_number(divisor := schema.get("multipleOf")) and divisor > _MAX_DIVISOR:
        raise InputError(f"the JSON schema has multipleOf {shown(divisor)}; the limit is {_MAX_DIVISOR}")


def _require_exact(value: Any, keyword: str) -> None:
    """Raise InputError if `value` contains a number that float64 or int64 cannot represent."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _require_exact(part, keyword)
    elif _is_number(value) and abs(value) >= _EXACT and not _is_certain(value):
        raise InputError(
            f"the JSON schema has {shown(value)} in {keyword}; numbers there are exact only from -{_EXACT} to "
            f"{_EXACT}. Use a string instead"
        )


def _is_certain(value: float) -> bool:
    """Return whether llguidance reads a number exactly. A large float may already have been rounded by the parser."""
    return isinstance(value, int) and abs(value) <= _LARGEST and _as_read(value, integers=True) == {value}


def _rewrite_bounds(schema: dict[str, Any]) -> None:
    """Move the bounds of `schema` inward, in place, to numbers that llguidance reads without rounding."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    integers = "integer" in kinds and "number" not in kinds
    given = [schema.get(name) for name in ("minimum", "maximum")]
    _rewrite_bound(schema, "minimum", "exclusiveMinimum", 1, integers)
    _rewrite_bound(schema, "maximum", "exclusiveMaximum", -1, integers)
    _require_range(schema, given)
    # If there is only one bound and it is large, add the other. llguidance would otherwise compute the largest number
    # with as many digits, which does not fit in an int64.
    if _is_number(low := schema.get("minimum")) and low >= _NINETEEN_DIGITS:
        schema.setdefault("maximum", _INT64_MAX if integers else _LARGEST)
    if _is_number(high := schema.get("maximum")) and high <= -_NINETEEN_DIGITS:
        schema.setdefault("minimum", -_LARGEST)


def _require_range(schema: Mapping[str, Any], given: Sequence[Any]) -> None:
    """Raise InputError if the rewritten bounds exclude all numbers, but the `given` bounds did not."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if _is_number(low) and _is_number(high) and low > high and all(map(_is_number, given)) and given[0] <= given[1]:
        raise InputError(
            f"the JSON schema has minimum {shown(given[0])} and maximum {shown(given[1])}, but no exact number "
            f"lies between them; numbers are exact only from -{_EXACT} to {_EXACT}. Use a string instead"
        )


def _rewrite_bound(schema: dict[str, Any], name: str, exclusive: str, inwards: int, integers: bool) -> None:
    """Replace the bound `name` and its `exclusive` variant with one exact bound, unless both are small.

    `inwards` is the direction in which bounds are moved: 1 for a minimum, -1 for a maximum.
    """
    given = [(key, schema[key]) for key in (name, exclusive) if _is_number(schema.get(key))]
    if all(abs(value) < _EXACT for _, value in given):
        if not integers:
            _include(schema, name, exclusive, inwards)
        return
    nearest = [_innermost(value, inwards, integers, strict=key == exclusive) for key, value in given]
    for key, _ in given:
        del schema[key]
    innermost: Callable[..., int | float] = max if inwards > 0 else min
    schema[name] = innermost(nearest)


def _include(schema: dict[str, Any], name: str, exclusive: str, inwards: int) -> None:
    """Replace an excluded integer bound by an inclusive bound slightly beyond it, in place, if it is farther from zero.

    If the bounds contradict each other, nothing is replaced, so that llguidance's error names the given bounds.
    """
    bound = schema.get(exclusive)
    if not _is_number(bound) or bound != int(bound) or inwards * bound < 0:
        return
    opposite = ("maximum", "exclusiveMaximum") if inwards > 0 else ("minimum", "exclusiveMinimum")
    if any(_is_number(other := schema.get(key)) and inwards * (bound - other) >= 0 for key in opposite):
        return
    num_decimals = _NUM_DIGITS - len(str(abs(int(bound))))
    if num_decimals < 2:
        return
    nearest = bound + inwards * (10**-num_decimals if bound else _SMALLEST)
    del schema[exclusive]
    innermost: Callable[..., int | float] = max if inwards > 0 else min
    schema[name] = innermost(nearest, schema[name]) if _is_number(schema.get(name)) else nearest


def _innermost(bound: float, inwards: int, integers: bool, *, strict: bool) -> int | float:
    """Return the nearest number on the inner side of `bound` that llguidance reads exactly.

    `strict` excludes `bound` itself.
    """
    if abs(bound) < _EXACT:
        if not strict:
            return bound
        return _next_integer(bound, inwards) if integers else math.nextafter(bound, inwards * math.inf)
    least = Fraction(bound)
    if strict and integers:
        least, strict = Fraction(_next_integer(bound, inwards)), False
    if integers and inwards < 0 and least >= _INT64_MAX:
        return _INT64_MAX  # llguidance reads 2**63 and reduces it to the largest int64
    if inwards * least > _LARGEST:
        raise InputError(f"the JSON schema has the bound {shown(bound)}; the limits are -{_LARGEST} and {_LARGEST}")
    nearest = float(max(-_LARGEST, min(_LARGEST, math.ceil(least) if inwards > 0 else math.floor(least))))
    while not all(inwards * (read - least) >= strict for read in _as_read(nearest, integers=integers)):
        nearest = math.nextafter(nearest, inwards * math.inf)
    return int(nearest)


def _next_integer(bound: float, inwards: int) -> int:
    return math.floor(bound) + 1 if inwards > 0 else math.ceil(bound) - 1


def _as_read(value: float, *, integers: bool) -> set[Fraction]:
    """Return the numbers that llguidance may read for `value`.

    These are the float64 of `value` and, unless `integers` is set, the shortest decimal representation of this float64.
    """
    number = float(value)
    return {Fraction(number)} if integers else {Fraction(number), Fraction(repr(number))}


def _rewrite_lengths(schema: dict[str, Any]) -> None:
    """Rewrite the limits on lengths, in place, to integers that llguidance accepts. For example, 5.0 becomes 5."""
    for name in (*_LEAST_LENGTHS, *_MOST_LENGTHS):
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = value = int(value)
        if _is_number(value) and value > _MOST:
            if name in _LEAST_LENGTHS:
                raise InputError(f"the JSON schema has {name} {shown(value)}; the limit is {_MOST}")
            schema[name] = _MOST


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
