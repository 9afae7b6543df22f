"""Analyzes the JSON schemas of arguments, for formats in which the values of arguments are raw text."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.scanner import MAX_NAME
from mindie_mm.tool_calls.tool import Tool

_DEFINITIONS = frozenset({"$defs", "definitions"})
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "strict"})
_UNIONS = ("anyOf", "oneOf")
_CONDITIONS = frozenset({"not", "if", "allOf"})
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. The set is empty for an invalid schema, or if it allows all types."""
    types: set[str] = set()
    for part in _parts(schema, root):
        if isinstance(values := part.get("enum", [part["const"]] if "const" in part else None), list):
            types.update(type_of(value) for value in values)
        else:
            kind = part.get("type")
            types.update(one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str))
    return frozenset(types)


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _KINDS.get(type(value), "null")


def properties_of(tool: Tool, names: re.Pattern[str]) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the schema of each argument of a tool, and whether the argument is required.

    Args:
        tool: Tool to analyze.
        names: Pattern of the names that the format can represent.

    Raises:
        InputError: The schema is invalid, is a union, uses a keyword that the format cannot enforce, or has an argument
            whose name the format cannot represent.

    """
    where = f"the parameters of the tool {reprlib.repr(tool.name)}"
    root = tool.schema
    parts = list(_parts(root, root))
    if len(parts) != 1:
        raise InputError(f"{where} are a union of {len(parts)} schemas, which this tool-call format cannot enforce")
    (schema,) = parts
    for key in schema:
        if key not in _OF_OBJECTS | _ANNOTATIONS | _DEFINITIONS and not key.startswith("x-"):
            raise InputError(f"{where} use the keyword {reprlib.repr(key)}, which this tool-call format cannot enforce")
    properties = keyword(schema, "properties", Mapping, where) or {}
    required = keyword(schema, "required", list, where) or []
    for name in (*properties, *required):
        if not isinstance(name, str) or not names.fullmatch(name) or len(name) > MAX_NAME:
            raise InputError(f"{where} contain the name {reprlib.repr(name)}, which this tool-call format cannot write")
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    return {
        name: ({**(part if isinstance(part, Mapping) else {}), **definitions}, name in required)
        for name, part in {**{key: {} for key in required}, **properties}.items()
    }


def branches_of(schema: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Split a schema into schemas that each allow a single type or a constant. Their union is `schema`.

    Raises:
        InputError: The schema cannot be split in this way.

    """
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    branches: list[dict[str, Any]] = []
    for part in _parts(schema, schema):
        if unfit := part.keys() & {*_CONDITIONS, *_UNIONS, "$ref"}:
            raise InputError(
                f"the schema of {where} uses the keyword {reprlib.repr(min(unfit))}, which this tool-call format "
                "cannot enforce"
            )
        values = [part["const"]] if "const" in part else keyword(part, "enum", list, where)
        kind = part.get("type")
        if values is not None:
            branches.extend({"const": value} for value in values)
        elif isinstance(kind, list):
            branches.extend({**part, **definitions, "type": one} for one in kind)
        elif kind or not part.keys() - _ANNOTATIONS - _DEFINITIONS:
            branches.append({"type": "string", **part, **definitions})
        else:
            raise InputError(f"the schema of {where} has no type; this tool-call format requires a type")
    if not branches:
        raise InputError(f"the schema of {where} allows no value")
    return branches


def keyword(schema: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return the value of a keyword, or None if the keyword is missing. Raise InputError if its type is not `kind`."""
    value = schema.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise InputError(f"{where}: {name} is {reprlib.repr(value)}, which is not valid in a JSON schema")
    return value


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield schemas whose union is `schema`. References in `schema` are resolved.

    A schema whose reference or combination cannot be resolved is yielded unchanged. Each reference is followed only
    once, because following it again would not change the union.
    """
    seen: set[str] = set()
    stack = [schema]
    while stack:
        part = stack.pop()
        part = part if isinstance(part, Mapping) else {}
        reference = part.get("$ref")
        if isinstance(reference, str):
            target = _referenced(reference, root)
            if not isinstance(target, Mapping):
                yield part
            elif reference not in seen:
                seen.add(reference)
                stack.append({**target, **{key: value for key, value in part.items() if key != "$ref"}})
            continue
        union = next((key for key in _UNIONS if isinstance(part.get(key), list)), None)
        if union is None and isinstance(parts := part.get("allOf"), list) and len(parts) == 1:
            union = "allOf"
        if union is None or part.keys() - _ANNOTATIONS - _DEFINITIONS - {union}:
            yield part
            continue
        stack.extend(reversed(part[union]))


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for key in reference.removeprefix("#/").split("/"):
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
