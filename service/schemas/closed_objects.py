"""Changes JSON schemas so that objects may have only the properties that the schema lists."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

_HOLD_SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties"})
_HOLD_NAMED_SCHEMAS = frozenset({"properties", "patternProperties"})
_DEFINITIONS = ("$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINING = frozenset({"allOf", "$ref", *_ALTERNATIVES})


def closed(schema: Any) -> Any:
    """Return a copy of `schema` in which objects may have only the properties that `properties` lists.

    A schema with `additionalProperties` is not changed. Neither are schemas that together describe one object, such as
    the members of `allOf`, because each of them lists only some of the object's properties.

    Raises:
        RecursionError: The schema is nested too deeply.

    """
    return _closed(schema, set(_combined_references(schema)), alone=True)


def _closed(schema: Any, combined: Collection[str], *, alone: bool) -> Any:
    """Return the closed schema. `alone` is true if no other schema describes the same value."""
    if isinstance(schema, list):
        return [_closed(part, combined, alone=alone) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _HOLD_SCHEMAS & closed.keys():
        closed[key] = _closed(closed[key], combined, alone=True)
    for key in _HOLD_NAMED_SCHEMAS & closed.keys():
        if isinstance(named := closed[key], dict):
            closed[key] = {name: _closed(part, combined, alone=True) for name, part in named.items()}
    for key in _DEFINITIONS:
        if isinstance(named := closed.get(key), dict):
            closed[key] = {
                name: _closed(part, combined, alone=f"#/{key}/{name}" not in combined) for name, part in named.items()
            }
    together = not alone or _combines(schema)
    for key in ("allOf", *_ALTERNATIVES):
        if key in closed:
            closed[key] = _closed(closed[key], combined, alone=not together)
    return {"additionalProperties": False} | closed if "properties" in closed and not together else closed


def _combines(schema: dict[str, Any]) -> bool:
    """Return whether several parts of `schema` describe the same object together."""
    parts = [part for key in ("allOf", *_ALTERNATIVES) for part in _list(schema.get(key)) if _describes(part)]
    num_together = sum(_describes(part) for part in _list(schema.get("allOf")))
    num_together += any(key in schema and any(map(_describes, _list(schema[key]))) for key in _ALTERNATIVES)
    num_together += "$ref" in schema
    num_together += "properties" in schema
    return num_together > 1 and bool(parts or "$ref" in schema)


def _describes(part: Any) -> bool:
    """Return whether a schema may list properties of the object that it describes."""
    return isinstance(part, dict) and ("properties" in part or not _COMBINING.isdisjoint(part))


def _combined_references(schema: Any) -> Iterator[str]:
    """Yield the references to schemas that describe an object together with another schema."""
    left = [(schema, False)]
    while left:
        part, together = left.pop()
        if isinstance(part, list):
            left += [(one, together) for one in part]
        elif isinstance(part, dict):
            together = together or _combines(part)
            if together and isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += [(one, together and key in _COMBINING) for key, one in part.items()]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
