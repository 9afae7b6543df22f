"""Changes JSON schemas so that objects may have only the properties that the schema lists."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from mindie_mm.errors import LimitExceeded

_HOLD_SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties"})
_HOLD_NAMED_SCHEMAS = frozenset({"properties", "patternProperties"})
_DEFINITIONS = ("$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf")
_STATE_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say which other properties an object may have."""
_MAX_READ = 2**17
_COMBINING = frozenset({"allOf", "$ref", *_ALTERNATIVES})


def closed(schema: Any) -> Any:
    """Return a copy of `schema` in which objects may have only the properties that `properties` lists.

    A schema with `additionalProperties` is not changed. If several schemas together describe one object, as the members
    of `allOf` do, each of them lists only some of the object's properties. The schema that combines them is then closed
    to all of these properties.

    Raises:
        RecursionError: The schema is nested too deeply.
        LimitExceeded: The schemas that together describe objects have too many parts and properties.

    """
    return _Closing(schema, frozenset(_combined_references(schema))).closed(schema, alone=True)


@dataclass(frozen=True, slots=True)
class _Closing:
    root: Any
    combined: Collection[str]
    """References to schemas that describe an object together with another schema, and therefore stay open. They are
    not percent-encoded."""
    num_read: list[int] = field(default_factory=lambda: [0])
    """Number of parts and properties that `_names` has read. The list has one element."""

    def closed(self, schema: Any, *, alone: bool) -> Any:
        """Return the closed schema. `alone` is true if no other schema describes the same value."""
        if isinstance(schema, list):
            return [self.closed(part, alone=alone) for part in schema]
        if not isinstance(schema, dict):
            return schema
        closed = self._closed_inside(schema)
        is_combined = _combines(schema) or self._is_open(schema.get("$ref"))
        for key in ("allOf", *_ALTERNATIVES):
            if key in closed:
                closed[key] = self.closed(closed[key], alone=alone and not is_combined)
        if not alone:
            return closed
        if is_combined and (names := self._names(schema)):
            own = closed.get("properties")
            closed["properties"] = {name: own.get(name, {}) if isinstance(own, dict) else {} for name in names}
            return {**closed, "additionalProperties": False}
        return {"additionalProperties": False} | closed if "properties" in closed and not is_combined else closed

    def _closed_inside(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a schema in which the schemas of other values are closed."""
        closed = dict(schema)
        for key in _HOLD_SCHEMAS & closed.keys():
            closed[key] = self.closed(closed[key], alone=True)
        for key in _HOLD_NAMED_SCHEMAS & closed.keys():
            if isinstance(named := closed[key], dict):
                closed[key] = {name: self.closed(part, alone=True) for name, part in named.items()}
        for key in _DEFINITIONS:
            if isinstance(named := closed.get(key), dict):
                closed[key] = {
                    name: self.closed(part, alone=not self._is_open(f"#/{key}/{_escaped(name)}"))
                    for name, part in named.items()
                }
        return closed

    def _is_open(self, reference: Any) -> bool:
        return isinstance(reference, str) and unquote(reference) in self.combined

    def _names(self, schema: Any) -> list[str]:
        """Return the properties that all parts of a schema list, or an empty list if a part allows others."""
        names: dict[str, None] = {}
        seen: set[str] = set()
        stack = [schema]
        while stack:
            part = stack.pop()
            if not isinstance(part, dict):
                continue
            if not _STATE_OTHERS.isdisjoint(part):
                return []
            properties = part.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            names |= dict.fromkeys(properties)
            self.num_read[0] += 1 + len(properties)
            if self.num_read[0] > _MAX_READ:
                raise LimitExceeded(
                    f"the JSON schema combines schemas with more than {_MAX_READ} parts and properties; set "
                    "additionalProperties in them"
                )
            for key in reversed(("allOf", *_ALTERNATIVES)):
                stack += reversed(_list(part.get(key)))
            if isinstance(reference := part.get("$ref"), str) and reference not in seen:
                seen.add(reference)
                stack.append(_referenced(reference, self.root))
        return list(names)


def _escaped(name: str) -> str:
    """Return a name as a JSON pointer contains it."""
    return name.replace("~", "~0").replace("/", "~1")


def _referenced(reference: str, root: Any) -> Any:
    target = root
    for key in unquote(reference).removeprefix("#").split("/")[1:]:
        target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


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
    """Yield the decoded references to schemas that describe an object together with another schema."""
    left = [(schema, False)]
    while left:
        part, together = left.pop()
        if isinstance(part, list):
            left += [(one, together) for one in part]
        elif isinstance(part, dict):
            together = together or _combines(part)
            if together and isinstance(part.get("$ref"), str):
                yield unquote(part["$ref"])
            left += [(one, together and key in _COMBINING) for key, one in part.items()]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
