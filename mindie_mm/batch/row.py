"""One record of the input to one prompt, in whichever form it came."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.batch.source import MEDIA_MARK, SUFFIXES, Files, Record, suffix_of
from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs import (
    KINDS,
    Item,
    Media,
    Message,
    Text,
    parse_inputs,
    parse_messages,
)
from mindie_mm.media.source import source_path

_PROMPTS = ("inputs", "messages")
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)
_TEXTS = ("text", "prompt")
_FLAT = (*_TEXTS, *KINDS, *(f"{kind}s" for kind in KINDS))


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt: one user turn of items, or messages."""

    items: Sequence[Item] | None = None
    messages: Sequence[Message] | None = None


def row_id(record: Record) -> str | None:
    """What the input calls a row, as far as that can be read; None where it does not."""
    if isinstance(record, Files):
        described = record.files.get(f"{record.key}.json")
        return (row_id(described) if described is not None else None) or printable(record.key)
    try:
        value = msgspec.json.decode(record, type=_Named) if isinstance(record, bytes) else _Named(record.get("id"))
    except (*_NOT_JSON, RecursionError):
        return None
    return str(value.id) if isinstance(value.id, str | int) else None


def printable(text: str) -> str:
    """`text` with whatever is not Unicode, such as a byte of a file's name, written out: a table holds nothing else."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Named(msgspec.Struct):
    id: Any = None


def parse(record: Record, folder: Path, template: str) -> Row:
    """The row of a record of a file in `folder`; `template` is for records that are files. InputError and below.

    A record is a `List[Dict]`, or an object with `inputs` (such a list) or `messages`, or with `text` (or `prompt`),
    `image`, `video`, `audio`, `images`...: then the media come first, in the object's order. A null is as good as no
    key, in whatever depth, because a table has a column for each key of any row. Paths are those of `folder`.
    """
    try:
        if isinstance(record, Files):
            return _from_files(record, folder, template)
        if isinstance(record, bytes):
            decoded = _decoded(record, "the row")
            return _from_object({"inputs": decoded} if isinstance(decoded, list) else decoded, folder)
        return _from_object(record, folder)
    except RecursionError:
        raise InputError("the row is nested too deeply") from None


def _from_object(record: Any, folder: Path) -> Row:
    if not isinstance(record, Mapping):
        raise InputError(f"the row is {type(record).__name__}; it must be an object or a list of items")
    record = _without_nulls(record)
    if not isinstance(record.get("id", ""), str | int):
        raise InputError(f"the row's id is {type(record['id']).__name__}; it must be a string or an integer")
    given = [key for key in _PROMPTS if key in record]
    flat = [key for key in _FLAT if key in record]
    if flat and not given:
        return _located(Row(parse_inputs(_flat_items(record))), folder)
    if flat or len(given) != 1:
        raise InputError(f"the row has {given + flat or sorted(record)}; it takes inputs, messages, or text and media")
    prompt = record[given[0]]
    if isinstance(prompt, str):
        prompt = _decoded(prompt, f"the row's {given[0]}")
    row = Row(messages=parse_messages(prompt)) if given[0] == "messages" else Row(parse_inputs(prompt))
    return _located(row, folder)


def _from_files(record: Files, folder: Path, template: str) -> Row:
    """Files of one name: a .json with a prompt, whose paths may be the others'; else media, and a .txt or template."""
    by_suffix = {suffix_of(name): data for name, data in record.files.items()}
    if ".json" in by_suffix:
        described = _decoded(by_suffix[".json"], f"{record.key}.json")
        if isinstance(described, dict) and described.keys() & {*_PROMPTS, *_FLAT} - set(_TEXTS):
            by_base = {os.path.basename(name): data for name, data in record.files.items()}  # noqa: PTH119 - no path
            return _from_object(_embedded(described, by_base | record.files), folder)
        if isinstance(described, dict):
            template = next((described[key] for key in _TEXTS if isinstance(described.get(key), str)), template)
    media = [
        Media(SUFFIXES[suffix], data) for name, data in record.files.items() if (suffix := suffix_of(name)) in SUFFIXES
    ]
    if not media:
        raise MediaError(f"{record.key} has no medium among {sorted(by_suffix)}")
    try:
        template = template or by_suffix.get(".txt", b"").decode()
    except UnicodeDecodeError:
        raise InputError(f"{record.key}.txt is not UTF-8") from None
    before, _, after = template.rpartition(MEDIA_MARK)
    items: list[Item] = [Text(before), *media, Text(after)]
    return Row([item for item in items if item != Text("")])


def _embedded(value: Any, files: Mapping[str, bytes]) -> Any:
    """A prompt with the bytes of its files in place of their names."""
    if isinstance(value, dict):
        return {key: one if key == "text" else _embedded(one, files) for key, one in value.items()}
    if isinstance(value, list):
        return [_embedded(one, files) for one in value]
    return files.get(value, value) if isinstance(value, str) else value


def _flat_items(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    media: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for key, value in record.items():
        if key in _TEXTS:
            texts.append({"text": value})
        elif key in _FLAT:
            kind = key.removesuffix("s")
            media += [{kind: one} for one in (value if isinstance(value, list) else [value])]
    return media + texts


def _without_nulls(value: Any) -> Any:
    """Nor with pictures and sounds as `datasets` writes them, their bytes beside a path: such a thing is its bytes."""
    if isinstance(value, Mapping):
        if value and value.keys() <= {"bytes", "path"}:
            return value.get("bytes") or value.get("path")
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _decoded(text: str | bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except _NOT_JSON as error:
        raise InputError(f"{what} is not JSON: {error}") from None


def _located(row: Row, folder: Path) -> Row:
    """`row` with the paths of its media seen from `folder`."""
    if row.messages is None:
        return replace(row, items=_located_items(row.items or (), folder))
    return replace(
        row,
        messages=[
            replace(message, content=_located_items(message.content, folder))
            if isinstance(message.content, tuple)
            else message
            for message in row.messages
        ],
    )


def _located_items(items: Sequence[Item], folder: Path) -> tuple[Item, ...]:
    return tuple(_located_item(item, folder) if isinstance(item, Media) else item for item in items)


def _located_item(item: Media, folder: Path) -> Media:
    if isinstance(item.source, str) and item.source.startswith("/"):  # absolute, or a JPEG in base64
        return item
    path = source_path(item)
    if path is None or path.is_absolute():
        return item
    return replace(item, source=os.fspath(folder / path))
