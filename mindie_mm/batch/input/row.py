"""Converts a record of the input, in any format, to a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import msgspec

from mindie_mm.batch.input.conversations import (
    CONVERSATION_KEYS,
    CONVERSATIONS,
    as_chat,
    is_completed,
    with_named_files,
)
from mindie_mm.batch.input.placed import has_places, has_question, with_media
from mindie_mm.batch.input.record import MEDIA_KEYS, UNREAD_KEYS, Files, Record, number_of
from mindie_mm.batch.input.request import CHAT, Adapt, is_batch_line, prompt_of
from mindie_mm.batch.input.row_id import id_text
from mindie_mm.batch.input.sniff import no_json
from mindie_mm.batch.input.source import MEDIA_MARK, NOT_JSON
from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs import (
    KINDS,
    OFF,
    PROMPT_FIELDS,
    Item,
    Media,
    Message,
    Text,
    parse_inputs,
    parse_messages,
    refused_fields,
    template_variables,
)
from mindie_mm.media.endings import ending_of, kind_of
from mindie_mm.media.source import located
from mindie_mm.msgspec_errors import in_words

_PROMPTS = ("inputs", "messages")
_TEXTS = ("text", "prompt")
_FLAT = MEDIA_KEYS.union(_TEXTS)
_VARIABLES = frozenset(
    {"tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "parse_special"}
)
_NOT_SERVED = {**PROMPT_FIELDS, "add_special_tokens": OFF}
_KNOWN = _FLAT.union(_PROMPTS, _VARIABLES, _NOT_SERVED, ["id"])
_FILE_KEYS = frozenset({"img", *(f"{kind}_{end}" for kind in KINDS for end in ("path", "file"))})
"""Keys that other formats use for the path of a media file. A row with text and no media may not have such a key."""
_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2"})

_Locate = Callable[[Media], Media]
"""Function that replaces the file name in a media item with the path or the bytes of the file."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, given as the items of one user turn or as messages."""

    items: Sequence[Item] | None = None
    messages: Sequence[Message] | None = None
    add_generation_prompt: bool = True
    """True if the prompt ends with the header of the assistant's turn."""
    template_kwargs: Mapping[str, Any] | None = None
    """Further variables for the chat template, such as `tools`."""
    reasoning_effort: str | None = None
    """Variable for the chat template. `ChatTraits.with_effort` adapts it to the template."""
    parse_special: bool | None = None
    """Same as `PromptOptions.parse_special`."""
    chat: bool | None = None
    """True if items are formatted as one user turn. None means the setting of the run."""
    answer_items: int = 0
    """Number of items at the end that are the answer, in a row without a chat template."""


def set_aside(columns: Collection[str], kept: Collection[str]) -> frozenset[str]:
    """Return the names among the `kept` columns that are not part of prompts. `columns` are the selected columns."""
    return frozenset(kept).difference(columns or _KNOWN.union(CONVERSATION_KEYS))


def parse(
    record: Record,
    folder: Path | str,
    template: str,
    aside: Collection[str] = (),
    *,
    whole: bool = False,
    chat: bool = True,
    adapt: Adapt | None = None,
) -> Row:
    """Convert a record to a row.

    A record is a list of items or an object. An object contains `inputs` (a list of items), `messages`, or text and
    media under keys such as `text` (or `prompt`), `image`, `images`, `video_url` and `audio`. In an object with text
    and media, the media precede the text in the prompt, in the order of the keys. In an object with `messages` and
    media, the media replace parts such as `{"type": "image"}`.

    An object may also contain `tools`, `tool_choice`, `chat_template_kwargs` and `add_generation_prompt`, as in the
    body of a chat request, and `parse_special`, as in the body of a completion. A null at any depth counts as a missing
    key, because a table has a column for each key of any row. A media object in which all values are null also counts
    as missing. All other keys are ignored, unless a key seems to contain half of the prompt.

    Args:
        record: Record to convert.
        folder: Base folder for relative paths, or its URL.
        template: Prompt for records of type `Files`.
        aside: Keys of the record that are not part of the prompt.
        whole: Whether to keep all turns of conversations in the formats of `as_chat`, and to end a chat after its last
            message by default. If False, a conversation ends before its first answer.
        chat: Whether the run applies the chat template. If not, a prompt and a completion that are strings stay texts.
        adapt: Function that adapts the chats of OpenAI's batch lines to the chat template, as `prompt_of` describes.

    Raises:
        InputError: The record is not a valid row.

    """
    try:
        if isinstance(record, Files):
            return _from_files(record, folder, template, aside, whole, chat)
        if isinstance(record, bytes):
            value = _without_nulls(_without(_decoded(record, "the row"), aside))
        else:
            value = _without_nulls(_without(record, aside), kept=frozenset())
        return _from_object(value, partial(located, folder=folder), whole, chat, adapt)
    except RecursionError:
        raise InputError("the row is nested too deeply") from None


def _without(record: Any, aside: Collection[str]) -> Any:
    return {key: value for key, value in record.items() if key not in aside} if isinstance(record, dict) else record


def _from_object(record: Any, locate: _Locate, whole: bool, chat: bool, adapt: Adapt | None = None) -> Row:
    if isinstance(record, list):
        record = {"inputs": record}
    if not isinstance(record, Mapping):
        raise InputError(f"the row is {type(record).__name__}; it must be an object or a list of items")
    id_text(record.get("id"))
    if is_batch_line(record):
        row = _from_row(prompt_of(record, adapt), locate, whole=False)
        return replace(row, chat=None if record["url"] == CHAT else False)
    return _from_row(record, locate, whole, chat)


def _from_row(record: Mapping[str, Any], locate: _Locate, whole: bool, chat: bool = True) -> Row:
    if MEDIA_KEYS.isdisjoint(record):
        record = with_named_files(record)
    record = as_chat(record, whole=whole, chat=chat)
    given = [key for key in _PROMPTS if key in record]
    flat = [key for key in record if key in _FLAT]
    if not (flat or given):
        raise InputError(f"the row has the keys {sorted(record)}; it must have inputs, messages, or text and media")
    prompt: Any = record[given[0]] if given else None
    if isinstance(prompt, str):
        prompt = _decoded(prompt, f"the row's {given[0]}")
    if (
        given == ["messages"]
        and MEDIA_KEYS.issuperset(flat)
        and (has_places(prompt) or (flat and has_question(prompt)))
    ):
        prompt, flat = with_media(prompt, _flat_items(record)), []
    if len(given) + bool(flat) > 1 or record.keys() >= {*_TEXTS}:
        raise InputError(
            f"the row has the keys {given + flat}, which conflict; give inputs, or messages, or text with media "
            "(prompt is an alias of text). Choose one of them with --select-columns"
        )
    variables = _variables(record, opens=not (whole and given == ["messages"]))
    if flat:
        _require_whole(record, flat)
        items = _flat_items(record)
        answer = [{"text": record["completion"]}] if whole and not chat and is_completed(record) else []
        return Row(_located(parse_inputs([*items, *answer]), locate), **variables, answer_items=len(answer))
    if given[0] == "inputs":
        return Row(_located(parse_inputs(prompt), locate), **variables)
    return Row(messages=[_located_message(message, locate) for message in parse_messages(prompt)], **variables)


def _require_whole(record: Mapping[str, Any], flat: Sequence[str]) -> None:
    """Raise InputError if the row has only text or only media, and an unknown key may contain the other half."""
    others = sorted(record.keys() - _KNOWN)
    chosen = ",".join(key for key in record if key == "id" or key in flat)
    if others and not any(key in _TEXTS for key in flat):
        raise InputError(
            f"the row has media but no text, and its keys {others} would be ignored. Rename the key of the text to "
            f"text, or use --select-columns {chosen} to read the row without text"
        )
    if MEDIA_KEYS.isdisjoint(flat) and (named := [key for key in others if key in _FILE_KEYS]):
        raise InputError(
            f"the row has text but no media, and its keys {named} would be ignored. Rename the key of the media to "
            f"image, video or audio, or use --select-columns {chosen} to read the row without media"
        )


def _from_files(
    record: Files, folder: Path | str, template: str, aside: Collection[str], whole: bool, chat: bool
) -> Row:
    """Convert the files of a tar's row.

    If the row's .json file contains a prompt, the prompt may refer to the other files as media. If not, all media files
    of the row are used, and the text comes from the .json file, from `template` or from a .txt file.
    """
    if record.repeated is not None:  # for example, because all rows have the same name
        raise InputError(
            f"the row {record.key} has several files named {record.repeated}; the names in a row must be different"
        )
    media = [Media(kind, data) for name, data in record.files.items() if (kind := kind_of(name))]
    described: Any = {}
    if (own := record.own(".json")) is not None:
        described = _without_nulls(_without(_decoded(own, f"{record.key}.json"), aside))
        # If the row has media files, the text in its .json file is only the text for these media.
        prompts = (MEDIA_KEYS if media else _FLAT).union(_PROMPTS, CONVERSATIONS)
        if not isinstance(described, dict) or described.keys() & prompts:
            return _from_object(described, partial(_located_file, files=record.files, folder=folder), whole, chat)
    if packed := [name for name in record.files if ending_of(name) in _PACKED and _is_meant(name)]:
        raise InputError(
            f"the row {record.key} has the compressed file {packed[0]}, which may contain part of the row. Unpack "
            "this file"
        )
    if not media:
        raise MediaError(
            f"the row {record.key} has no media file; its files have the extensions "
            f"{sorted({*map(ending_of, record.files)})}"
        )
    text = _own_text(record, described) or template or _text_file(record)
    if not text and (others := sorted(described.keys() - _KNOWN)):
        raise InputError(
            f"the row {record.key} has media but no text, and the keys {others} in its .json file would be ignored. "
            "Rename the key of the text to text, give text with --template, or use --select-columns id to read the "
            "row without text"
        )
    if text.count(MEDIA_MARK) > 1:
        raise InputError(
            f"the text of the row {record.key} contains {MEDIA_MARK} {text.count(MEDIA_MARK)} times; it may contain "
            "this mark only once"
        )
    before, _, after = text.rpartition(MEDIA_MARK)
    items: list[Item] = [Text(before), *media, Text(after)]
    return Row([item for item in items if item != Text("")], **_variables(described))


def _is_meant(name: str) -> bool:
    """Return whether a compressed file would be read if it were not compressed."""
    inner = PurePath(name).stem
    return kind_of(inner) is not None or ending_of(inner) in (".json", ".txt")


def _own_text(record: Files, described: Mapping[str, Any]) -> str:
    texts = [value for key, value in described.items() if key in _TEXTS] or [""]
    if len(texts) > 1:
        raise InputError(
            f"{record.key}.json has both text and prompt, which is an alias of text. Remove one of these keys"
        )
    if not isinstance(texts[0], str):
        raise InputError(f"the text in {record.key}.json is {type(texts[0]).__name__}; it must be a string")
    return texts[0]


def _text_file(record: Files) -> str:
    """Return the text of the row's .txt file. If there are several .txt files, use the file named after the key.

    Raises:
        InputError: No file is named after the key, or the file is not UTF-8.

    """
    texts = {name: data for name, data in record.files.items() if ending_of(name) == ".txt"}
    text = record.own(".txt")
    if text is None and len(texts) > 1:
        raise InputError(
            f"the row {record.key} has the text files {sorted(texts)}; rename one of them to {record.key}.txt"
        )
    try:
        return (b"".join(texts.values()) if text is None else text).decode()
    except UnicodeDecodeError:
        raise InputError(f"{record.key}.txt is not UTF-8. Convert this file to UTF-8") from None


def _located_file(media: Media, files: Mapping[str, bytes], folder: Path | str) -> Media:
    """Replace the file name in `media` with the bytes of the row's file of this name. The name may omit the folder."""
    for name, data in files.items():
        if media.source in (name, name.rpartition("/")[2]):
            return msgspec.structs.replace(media, source=data)
    return located(media, folder)


def _flat_items(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    media: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for key, value in record.items():
        if key in _TEXTS:
            texts.append({"text": value})
        elif key in MEDIA_KEYS:
            name = key.removesuffix("s")
            media += [{name: one} for one in (value if isinstance(value, list) else [value])]
    return media + texts


def _variables(record: Mapping[str, Any], *, opens: bool = True) -> dict[str, Any]:
    """Return the fields of a `Row` besides its items and messages. They are read as in the body of a request.

    `opens` is the default of `add_generation_prompt`.

    Raises:
        InputError: A field is not valid or not supported.

    """
    if refused := refused_fields(record, _NOT_SERVED):
        raise InputError(f"the row has the key {refused[0]}, which is not supported. Remove this key")
    if _VARIABLES.isdisjoint(record):
        return {"add_generation_prompt": opens}
    stated = _typed(record, "add_generation_prompt", bool)
    kwargs = _typed(record, "chat_template_kwargs", dict[str, Any])
    tools = _typed(record, "tools", list[dict[str, Any]])
    if not isinstance(effort := record.get("reasoning_effort"), str | None):
        raise InputError(f"the row's reasoning_effort is {type(effort).__name__}; it must be a string")
    return {
        "add_generation_prompt": opens if stated is None else stated,
        "template_kwargs": template_variables(kwargs, tools, record.get("tool_choice")),
        "reasoning_effort": effort,
        "parse_special": _typed(record, "parse_special", bool),
    }


def _typed(record: Mapping[str, Any], key: str, kind: Any) -> Any:
    """Return the value under `key` as type `kind`, or None if the key is missing. The value may be JSON text.

    Raises:
        InputError: The value has another type.

    """
    value = record.get(key)
    if isinstance(value, str):
        value = _decoded(value, f"the row's {key}")
    try:
        return msgspec.convert(value, kind | None)
    except msgspec.ValidationError as error:
        raise InputError(f"the row's {key}: {in_words(error)}") from None


def _without_nulls(value: Any, key: str = "", kept: frozenset[str] = UNREAD_KEYS, flat: bool = True) -> Any:
    """Remove nulls from `value`, convert decimals to numbers, and convert media of the `datasets` library to bytes.

    NaN and infinities, which only tables can have, count as null. The `datasets` library writes a media item as an
    object with bytes and a path. If both are null, the object counts as null. Values under the keys in `kept` are not
    changed. In a `flat` row, nulls are removed from lists of media. In a list inside an item, nulls are kept, because
    they represent missing frames of a video.
    """
    if isinstance(value, Mapping):
        if key in MEDIA_KEYS and value:
            if all(one is None for one in value.values()):
                return None
            if value.keys() <= {"bytes", "path"}:
                return value.get("bytes") or value.get("path") or b""
        return {
            name: left
            for name, one in value.items()
            if (left := one if name in kept else _without_nulls(one, name, kept, flat)) is not None
        }
    if isinstance(value, list):
        without = (_without_nulls(one, key, kept, flat=False) for one in value)
        return [left for left in without if left is not None or not (flat and key in MEDIA_KEYS)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return number_of(value) if isinstance(value, Decimal) and key != "id" else value


def _decoded(text: str | bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NOT_JSON as error:
        raise InputError(f"{what} is not JSON: {no_json(text) or in_words(error)}") from None


def _located_message(message: Message, locate: _Locate) -> Message:
    return (
        replace(message, content=_located(message.content, locate)) if isinstance(message.content, tuple) else message
    )


def _located(items: Sequence[Item], locate: _Locate) -> tuple[Item, ...]:
    return tuple(_located_item(item, locate) if isinstance(item, Media) else item for item in items)


def _located_item(media: Media, locate: _Locate) -> Media:
    if not isinstance(media.source, tuple):
        return locate(media)
    return msgspec.structs.replace(media, source=tuple(locate(Media("image", frame)).source for frame in media.source))
