"""Columns of the input that a run carries through to its output, such as labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from mindie_mm.batch.input.record import Files, Record
from mindie_mm.batch.input.source import NOT_JSON, Source, Table
from mindie_mm.errors import InputError

JSON = "json"
"""Type of a column that contains JSON texts."""
_LIST = re.compile(r"list<(?:\w+: )?(.+?)>")
_EMPTY = "list<"
"""Type of an empty list, which may belong to any type of lists."""
_LARGE = "large integer"
"""Type of an int64 that a double may not represent. Its column has the type int64 or JSON."""
_INT64 = range(-(2**63), 2**63)
_EXACT = range(-(2**53), 2**53 + 1)
"""Integers that a double represents exactly."""
_PLAIN = {"bool": bool, "double": float, "string": str}
"""Types whose values need no conversion."""
_DECODING = (*NOT_JSON, RecursionError)


def kept_columns(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the type by name of columns that are given as `name` or `name=type`, or as a mapping.

    A type that is not given is empty.

    Raises:
        InputError: A name occurs twice, or a type is unknown.

    """
    columns: dict[str, str] = {}
    if isinstance(given, Mapping):
        pairs = [*given.items()]
    else:
        pairs = [(name, kind) for name, _, kind in (part.partition("=") for part in given)]
    for name, kind in pairs:
        if name in columns:
            raise InputError(f"keep_columns has {name} twice. Remove one of them")
        if kind not in ("", JSON) and (not isinstance(kind, str) or arrow_type(kind) is None):
            raise InputError(
                f"the column {name} has the type {kind!r}, which is unknown. Use json or a type of Arrow, such as "
                "bool, int64, double, string or list<int64>"
            )
        columns[name] = kind
    return columns


def arrow_type(kind: str) -> Any:
    """Return the Arrow type with a name, such as `int64` or `list<int64>`, or None if there is none."""
    import pyarrow as pa  # imported late, because the parent process of the workers may not need it

    if kind == JSON:
        return pa.string()
    if match := _LIST.fullmatch(kind):
        inner = arrow_type(match[1])
        return None if inner is None or match[1] == JSON else pa.list_(inner)
    try:
        return pa.type_for_alias(kind)
    except ValueError:
        return None


def types_of(columns: Mapping[str, str], sources: Sequence[Source]) -> dict[str, str]:
    """Return the type of each column. Infer a type that `columns` does not state from all rows of the input.

    Raises:
        InputError: An input has no rows with a column, or cannot be read.

    """
    if not columns:
        return {}
    found = [_types_in(source, columns) for source in sources]
    common = {name: _common({one for types in found for one in types[name]}) for name in columns}
    return {name: kind or common[name].replace(_LARGE, "int64") for name, kind in columns.items()}


def values_of(record: Record, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a record in the columns `types`. If a record is not valid JSON, return an empty dict.

    Raises:
        InputError: A value does not have the type of its column.

    """
    if not types:
        return {}
    text = (record.own(".json") or b"{}") if isinstance(record, Files) else record
    values = text if isinstance(text, Mapping) else next(_decoded([text], types), {})
    return {name: _typed(name, values[name], kind) for name, kind in types.items() if values.get(name) is not None}


def _types_in(source: Source, names: Collection[str]) -> dict[str, set[str]]:
    if isinstance(source, Table):
        if missing := [name for name in names if name not in source.schema.names]:
            raise InputError(f"{source.name} has no column named {missing[0]!r}. Correct --keep-columns")
        return {name: {_type_in(source, name)} for name in names}
    types: dict[str, set[str]] = {name: set() for name in names}
    unseen = set(names)
    for values in _decoded(source.texts(), names):
        unseen -= values.keys()
        for name, value in values.items():
            if value is not None:
                types[name].add(_type_of(value))
    if unseen:
        raise InputError(f"{source.name} has no row with the key {min(unseen)!r}. Correct --keep-columns")
    return types


def _type_in(table: Table, name: str) -> str:
    kind = _name_of(table.schema.field(name).type)
    if kind in ("int64", f"{_EMPTY}int64>") and not table.has_only(_EXACT, name):
        return kind.replace("int64", _LARGE)
    return kind


def _name_of(arrow: Any) -> str:
    """Return the name of an Arrow type. Types without a simple name, such as structs and decimals, are kept as JSON."""
    import pyarrow as pa

    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    name = str(arrow)
    if match := _LIST.fullmatch(name):
        name = f"list<{match[1]}>"
    return name if arrow_type(name) == arrow else JSON


def _decoded(texts: Iterable[bytes], names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the values under `names` of each JSON object. Other texts are left out, because their rows fail anyway."""
    fields, decoder = _decoder(tuple(names))
    for text in texts:
        try:
            row = decoder.decode(text)
        except _DECODING:
            continue
        yield {name: value for field, name in fields.items() if (value := getattr(row, field)) is not msgspec.UNSET}


@cache
def _decoder(names: Sequence[str]) -> tuple[dict[str, str], msgspec.json.Decoder[Any]]:
    """Return a decoder of JSON objects that keeps only the keys `names`, and the key of each field of its result.

    Results are cached, because creating a decoder takes 2 ms.
    """
    fields = {f"c{number}": name for number, name in enumerate(names)}
    row_type = msgspec.defstruct("_Columns", [(field, Any, msgspec.UNSET) for field in fields], rename=fields)
    return fields, msgspec.json.Decoder(row_type)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if value in _EXACT else _LARGE if value in _INT64 else JSON
    if isinstance(value, list):
        kind = _common({_type_of(one) for one in value})
        if not value:
            return _EMPTY
        return JSON if kind == JSON or kind.startswith(_EMPTY) else f"{_EMPTY}{kind}>"
    return "double" if isinstance(value, float) else "string" if isinstance(value, str) else JSON


def _common(types: Collection[str]) -> str:
    """Return the type that can represent values of all `types`."""
    if _EMPTY in types and all(one.startswith(_EMPTY) for one in types):
        types = {*types} - {_EMPTY}
    for numbers, kind in (({"int64", "double"}, "double"), ({"int64", _LARGE}, _LARGE)):
        if set(types) == numbers:
            return kind
        if set(types) == {f"{_EMPTY}{one}>" for one in numbers}:
            return f"{_EMPTY}{kind}>"
    return next(iter(types)) if len(types) == 1 else JSON


def _typed(name: str, value: Any, kind: str) -> Any:
    import pyarrow as pa

    if type(value) is _PLAIN.get(kind):
        return value
    try:
        if kind == JSON:
            return msgspec.json.encode(value, enc_hook=str).decode()
        return pa.array([value], arrow_type(kind))[0].as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise InputError(
            f"the row's {name} is {str(value)[:40]!r}, which is not of the type {kind} of this column. Give another "
            f"type: --keep-columns {name}=json"
        ) from None
