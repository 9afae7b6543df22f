"""Tools, and the JSON schemas of their arguments, which formats with raw text as values analyze."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.scanner import MAX_NAME

_DEFINITIONS = frozenset({"$defs", "definitions"})
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "strict"})
_UNIONS = ("anyOf", "oneOf")
_CONDITIONS = frozenset({"not", "if", "allOf"})
_NUMBERS = frozenset({"integer", "number"})
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. The set is empty for an invalid schema, or if it allows all types."""
    types: set[str] = set()
    for part in _parts(schema, root):
        stated = part.get("type")
        kinds = None if stated is None else [one for one in _listed(stated) if isinstance(one, str)]
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            types.update(type_of(value) for value in values if _is_of(value, kinds))
        else:
            types.update(kinds or ())
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
    other = schema.get("additionalProperties")
    return {
        name: ({**_mapping(part), **definitions}, name in required)
        for name, part in {**dict.fromkeys(required, other), **properties}.items()
    }


def branches_of(schema: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Split a schema into schemas of strings (`"type": "string"`) and schemas of other values. Their union is `schema`.

    The list is empty if the schema allows no value.

    Raises:
        InputError: The schema is invalid, or cannot be split in this way.

    """
    branches: list[dict[str, Any]] = []
    for part in _parts(schema, schema, exact=True):
        if unfit := part.keys() & {*_CONDITIONS, *_UNIONS, "$ref"}:
            raise InputError(
                f"the schema of {where} uses the keyword {reprlib.repr(min(unfit))}, which this tool-call format "
                "cannot enforce"
            )
        branches += _branches(part, where)
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return [{**branch, **definitions} for branch in branches]


def _branches(part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Split a schema without combinations in two: a schema for its strings, and one for its other values."""
    kinds = _kinds(part, where)
    values = _values(part, where)
    if values is None:
        if kinds is None and part.keys() - _ANNOTATIONS - _DEFINITIONS:
            raise InputError(f"the schema of {where} has no type; this tool-call format requires a type")
        others = [kind for kind in kinds or () if kind != "string"]
        strings = [{**part, "type": "string"}] if kinds is None or "string" in kinds else []
        return [*strings, *([{**part, "type": others}] if others else [])]
    fitting = [value for value in values if _is_of(value, kinds)]
    rest = {key: value for key, value in part.items() if key != "const"}
    texts = [value for value in fitting if isinstance(value, str)]
    strings = [{**rest, "type": "string", "enum": texts}] if texts else []
    return [
        *strings,
        *([{**rest, "enum": others}] if (others := [v for v in fitting if not isinstance(v, str)]) else []),
    ]


def _kinds(part: Mapping[str, Any], where: str) -> list[str] | None:
    """Return the types that a schema states, or None if it states no type."""
    kinds = part.get("type")
    if kinds is None:
        return None
    if not all(isinstance(kind, str) for kind in _listed(kinds)):
        raise InputError(f"{where}: type is {reprlib.repr(kinds)}, which is not valid in a JSON schema")
    return list(_listed(kinds))


def _values(part: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the values that both `enum` and `const` allow, or None if a schema has neither."""
    listed = keyword(part, "enum", list, where)
    if "const" not in part:
        return list(listed) if listed is not None else None
    only = part["const"]
    return [only] if listed is None or any(_equal(only, value) for value in listed) else []


def _equal(one: Any, other: Any) -> bool:
    if type_of(one) in _NUMBERS and type_of(other) in _NUMBERS:
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_of(value: Any, kinds: Collection[str] | None) -> bool:
    """Return whether a value has one of the types. None stands for all types."""
    if kinds is None or (kind := type_of(value)) in kinds:
        return True
    return (kind == "integer" and "number" in kinds) or (kind == "number" and "integer" in kinds and value % 1 == 0)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def keyword(schema: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return the value of a keyword, or None if the keyword is missing. Raise InputError if its type is not `kind`."""
    value = schema.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise InputError(f"{where}: {name} is {reprlib.repr(value)}, which is not valid in a JSON schema")
    return value


def _parts(schema: Any, root: Mapping[str, Any], *, exact: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield schemas whose union is `schema`. References in `schema` are resolved.

    A value that fits several alternatives of `oneOf` does not fit the schema. If `exact` is set, alternatives that a
    value may fit at the same time are therefore not separated.

    A schema whose reference or combination cannot be resolved is yielded unchanged. Each reference is followed only
    once, because following it again would not change the union.
    """
    seen: set[str] = set()
    stack = [schema]
    while stack:
        part = _mapping(stack.pop())
        reference = part.get("$ref")
        if isinstance(reference, str):
            target = _referenced(reference, root)
            target = _mapping(target) if isinstance(target, bool) else target
            if not isinstance(target, Mapping) or _conflict(target, part):
                yield part
            elif reference not in seen:
                seen.add(reference)
                stack.append({**target, **{key: value for key, value in part.items() if key != "$ref"}})
            continue
        union = next((key for key in _UNIONS if isinstance(part.get(key), list)), None)
        if union is None and isinstance(parts := part.get("allOf"), list) and len(parts) == 1:
            union = "allOf"
        overlapping = exact and union == "oneOf" and not _exclude_each_other(part[union], root)
        if union is None or overlapping or part.keys() - _ANNOTATIONS - _DEFINITIONS - {union}:
            yield part
            continue
        stack.extend(reversed(part[union]))


def _exclude_each_other(schemas: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Return whether no value fits two of the schemas, as far as their types and constants show."""
    for one, other in combinations(schemas, 2):
        kinds = [
            {"number" if kind == "integer" else kind for kind in types_of(schema, root)} for schema in (one, other)
        ]
        values = [_values(_mapping(schema), "oneOf") for schema in (one, other)]
        if all(kinds) and kinds[0].isdisjoint(kinds[1]):
            continue
        if None in values or any(_equal(a, b) for a, b in product(*filter(None, values))):
            return False
    return True


def _mapping(schema: Any) -> Mapping[str, Any]:
    """Return a schema as a mapping. `false` allows no value, and anything else that is not a mapping allows all."""
    if isinstance(schema, Mapping):
        return schema
    return {"enum": []} if schema is False else {}


def _conflict(target: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Return whether `part` states other constraints than the schema `target` that it refers to."""
    both = (target.keys() & part.keys()) - _ANNOTATIONS - _DEFINITIONS - {"$ref"}
    return any(not _equal(target[key], part[key]) for key in both)


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for key in unquote(reference).removeprefix("#/").split("/"):
        target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the object that contains the arguments, or None for a function without arguments."""

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments. It is always the schema of an object."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}
