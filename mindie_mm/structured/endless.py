"""Finds the references in a JSON schema that no finite value can match, because their targets require themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_NOTHING: Mapping[str, Any] = {"enum": []}
"""A schema that no value matches."""


def without_endless(schema: Any) -> Any:
    """Return a schema in which the references that no finite value can match allow nothing."""
    targets = {reference: _target(reference, schema) for reference in _references(schema)}
    finite: set[str] = set()
    names = list(targets)
    while True:
        num_before = len(finite)
        names = [name for name in reversed(names) if name not in finite]  # chains of references have either order
        for name in names:
            if _is_finite(targets[name], finite):
                finite.add(name)
        if len(finite) == num_before:
            return _without(schema, set(names) - finite) if len(finite) < len(targets) else schema


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _target(reference: str, root: Any) -> Any:
    """Return the schema that a reference names, or True if the document does not contain it."""
    target = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key, True) if isinstance(target, dict) else True
    return target if reference.startswith("#") else True


def _is_finite(schema: Any, finite: Collection[str]) -> bool:
    """Return whether a finite value may match a schema, if finite values match only the references in `finite`."""
    if not isinstance(schema, dict):
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in finite:
        return False
    needed = _list(schema.get("allOf"))
    kinds = _list(schema.get("type"))
    if kinds == ["object"] and isinstance(properties := schema.get("properties"), dict):
        needed = [*needed, *(part for name, part in properties.items() if name in _list(schema.get("required")))]
    if kinds == ["array"] and schema.get("minItems") and "prefixItems" not in schema:
        needed = [*needed, schema.get("items")]
    if not all(_is_finite(part, finite) for part in needed):
        return False
    return all(
        any(_is_finite(part, finite) for part in parts)
        for key in ("anyOf", "oneOf")
        if (parts := _list(schema.get(key)))
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _without(schema: Any, endless: Collection[str]) -> Any:
    if isinstance(schema, list):
        return [_without(part, endless) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str) and reference in endless:
        return dict(_NOTHING)
    return {key: value if key in ("const", "enum") else _without(value, endless) for key, value in schema.items()}
