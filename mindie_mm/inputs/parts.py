"""Parsing of the dicts of a `List[Dict]`, in this package's format and in the formats of chat messages."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mindie_mm.errors import InputError, LimitExceeded, naming
from mindie_mm.inputs.checks import require_dict, require_list, require_unicode, type_of
from mindie_mm.inputs.embeddings import Embeddings, grid_given
from mindie_mm.inputs.files import parse_file
from mindie_mm.inputs.items import (
    DOCUMENT,
    EMBEDDINGS_KEYS,
    GRID_KEYS,
    KINDS,
    PROMPT,
    Item,
    Kind,
    Media,
    Text,
    media_of,
)
from mindie_mm.inputs.options import parse_options
from mindie_mm.inputs.unknown_keys import pass_over

_SOURCES: Mapping[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    DOCUMENT: "image",
    **{key: kind for kind, key in EMBEDDINGS_KEYS.items()},
}
_TEXTS = ("text", "refusal")
"""Keys of text. OpenAI uses `refusal` in earlier turns of the assistant."""
_DECLARED: Mapping[str, str] = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
"""Other values of `type` and the values that they stand for. OpenAI's Responses API uses them."""
_AS_URL = '; send {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} or the URL of an image'
_FOREIGN: Mapping[str, str] = {
    "source": f"Anthropic's API{_AS_URL}",
    **dict.fromkeys(("inline_data", "inlineData", "file_data", "fileData"), f"Gemini's API{_AS_URL}"),
    "file_id": "OpenAI's Responses API; send the file itself, or its id in a part of the type file",
    **dict.fromkeys(
        ("tool_use_id", "input"),
        'Anthropic\'s API; send tool calls as "tool_calls" of the assistant, and results as messages of role "tool"',
    ),
}
"""Keys of parts in other APIs, with the API and what to send instead."""
_FILE = "file"
"""Key of a text file or a PDF in OpenAI's messages."""
_TYPES = (*_TEXTS, *dict.fromkeys((*KINDS, *_SOURCES)), _FILE, *_DECLARED)
"""Values of `type`."""
_MAX_TYPE = 40
GRID = "grid"
"""Key of the geometry of embeddings, for all families. `GRID_KEYS` has other names for some geometries."""
_BARE_SOURCES = ("url", "path", "base64")
_HINTS = frozenset({"cache_control", "uuid"})
"""Keys that control the caches of servers. They do not change how an item is read."""
_MAX_UUID = 256
MAX_LISTED_FRAMES = 2048
"""Maximum number of frames of a video that is a list of frames."""
_MAX_LISTED_IN_ALL = 2**15
"""Maximum number of frames in all lists of a call.

The limit is checked during parsing, because another frame costs a client only a comma in a URL, but costs the server
far more.
"""
_MAX_SCHEME = 65
"""Maximum length of a URL scheme in characters, including its colon."""
_JPEG_FRAMES = "data:video/jpeg;base64,"
"""Prefix of a URL with the frames of a video, as in vLLM. The frames follow as base64, separated by commas."""


def parse_inputs(inputs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Parse the items of a `List[Dict]`, in order. Refuse unknown keys.

    Raises:
        InputError: An item is invalid. The error states the index of the item, the key and the limit.

    """
    return list(parse_parts(inputs, "inputs", strict=True))


def parse_parts(
    parts: Sequence[Mapping[str, Any]], where: str, *, strict: bool = False, by_uuid: bool = False
) -> tuple[Item, ...]:
    """Parse a list of dicts, as in `parse_inputs`.

    Args:
        parts: The dicts.
        where: Name of the list in error messages.
        strict: Whether to refuse every unknown key.
        by_uuid: Whether to read the `uuid` of media items, and to allow items that have a `uuid` but no data.

    Raises:
        InputError: An item is invalid.
        LimitExceeded: The lists of video frames are too long.

    """
    require_list(parts, where)
    items: list[Item] = []
    num_frames = 0
    for index, part in enumerate(parts):
        parsed = _each(_parse_part(part, f"{where}[{index}]", strict=strict, by_uuid=by_uuid))
        items += parsed
        num_frames = add_frames(num_frames, media_of(parsed), where)
    return tuple(items)


def _each(item: Item) -> list[Item]:
    """Split an item with a list of embeddings into one item for each of them."""
    if not isinstance(item, Media) or not isinstance(item.source, Embeddings):
        return [item]
    return [msgspec.structs.replace(item, source=one) for one in item.source.each()]


def add_frames(num_frames: int, media: Sequence[Media], where: str) -> int:
    """Return `num_frames` plus the number of frames in lists of `media`. Raise LimitExceeded if the sum is too high."""
    num_frames += sum(item.num_listed_frames for item in media)
    if num_frames > _MAX_LISTED_IN_ALL:
        raise LimitExceeded(
            f"the lists of frames in {where} have more frames in total than the limit of {_MAX_LISTED_IN_ALL}"
        )
    return num_frames


def _parse_part(part: Mapping[str, Any], where: str, *, strict: bool, by_uuid: bool) -> Item:
    require_dict(part, where)
    declared = _declared(part, where)
    if declared is not None:
        part = {**part, "type": declared}
    if declared == EMBEDDINGS_KEYS[PROMPT]:
        part = _without_data(part, declared, where)
    given_uuid = part.get("uuid") if by_uuid else None
    key = _key(part, declared, where, may_lack_data=bool(given_uuid))
    part = {key: value for key, value in part.items() if key not in _HINTS and value is not None}
    if key in _TEXTS:
        return _parse_text(part, key, where, strict=strict)
    if key == _FILE:
        if declared not in (None, _FILE):
            raise InputError(f"{where}.type is {declared!r}, but the item has the key 'file'")
        options = {name: value for name, value in part.items() if name not in {"type", key}}
        return parse_file(
            part[key], parse_options("image", options, where, strict=strict), f"{where}.file", strict=strict
        )
    kind: Kind = _SOURCES.get(key, declared)  # type: ignore[arg-type] # a bare source has its kind declared
    if declared is not None and _SOURCES.get(declared) != kind:
        raise InputError(f"{where}.type is {declared!r}, but the item has the key {key!r}")
    options = {name: value for name, value in part.items() if name not in {"type", key}}
    uuid = _uuid(given_uuid, where) if key != DOCUMENT and given_uuid not in (None, "") else None
    if key in EMBEDDINGS_KEYS.values():
        beside = {name: value for name, value in part.items() if name in _grid_keys(kind)}
        unknown = options.keys() - beside.keys()
        pass_over(unknown, where, "embeddings have no options except their grid", strict=strict)
        source = _parse_embeddings(part.get(key), beside, kind, f"{where}.{key}", may_lack_data=uuid is not None)
        return Media(kind, source, uuid=uuid, is_embeddings=not isinstance(source, Embeddings))
    source, nested = _parse_source(part.get(key), key, kind, f"{where}.{key}", may_lack_data=uuid is not None)
    if both := options.keys() & nested.keys():
        raise InputError(
            f"{where} has {min(both)!r} both next to {key!r} and inside {key!r}; give this option only once"
        )
    if key == DOCUMENT and not isinstance(source, (str, bytes)):
        raise InputError(f"{where}.{key} is {type_of(source)}; it must be a path, bytes or a URL of a PDF or TIFF")
    parsed = parse_options(kind, options | nested, where, strict=strict)
    return Media(kind, source, parsed, is_document=key == DOCUMENT, uuid=uuid)


def _declared(part: Mapping[str, Any], where: str) -> str | None:
    """Return the type that a part declares, in this package's words. Raise InputError if there is no such type."""
    declared = part.get("type")
    if declared is None:
        return None
    if not isinstance(declared, str):
        raise InputError(f"{where}.type is {type_of(declared)}; it must be a string")
    if declared not in _TYPES:
        _refuse_foreign(part, where)
        raise InputError(f"{where}.type={declared[:_MAX_TYPE]!r} must be one of {', '.join(_TYPES)}")
    return _DECLARED.get(declared, declared)


def _refuse_foreign(part: Mapping[str, Any], where: str) -> None:
    """Raise InputError if a part has the form of another API."""
    for key in part:
        if key in _FOREIGN:
            raise InputError(f"{where} has {key!r}, as in {_FOREIGN[key]}")


def _without_data(part: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return a part whose embeddings are under `key`. vLLM's form has them under `data`."""
    if (data := part.get("data")) is None:
        return part
    if part.get(key) is not None:
        raise InputError(f"{where} has both 'data' and {key!r}; give the embeddings only once")
    return {**{name: value for name, value in part.items() if name != "data"}, key: data}


def _key(part: Mapping[str, Any], declared: str | None, where: str, *, may_lack_data: bool) -> str:
    """Return the key of a part's content. Raise InputError if there is not exactly one."""
    given = [key for key, value in part.items() if key not in _HINTS and value is not None]
    keys = [key for key in given if key in _TEXTS or key in _SOURCES or key == _FILE]
    if not keys and declared in KINDS:
        keys = [key for key in given if key in _BARE_SOURCES]
    nulls = [key for key, value in part.items() if value is None]
    if not keys and may_lack_data:
        keys = [key for key in nulls if key in _SOURCES] or [*filter(_SOURCES.__contains__, [declared or ""])]
    if len(keys) == 1:
        return keys[0]
    if not keys:
        _refuse_foreign(part, where)
    present = " and ".join(map(repr, keys)) if keys else f"none of them in {sorted(map(str, given))}"
    present += f", and null in {sorted(map(str, nulls))}" if nulls else ""
    if part.get("uuid") and not keys and not may_lack_data:
        present += "; media are not kept by uuid here, so send the data each time"
    raise InputError(f"{where} must have exactly one of text, image, video, audio; found {present}")


def _uuid(given: Any, where: str) -> str:
    """Return the client's name for an item."""
    if not isinstance(given, str):
        raise InputError(f"{where}.uuid is {type_of(given)}; it must be a string")
    if len(given) > _MAX_UUID:
        raise LimitExceeded(f"{where}.uuid has {len(given)} characters; the limit is {_MAX_UUID}")
    if not given.isprintable():
        raise InputError(f"{where}.uuid is {given!r}, which has characters that cannot be printed")
    return given


def _parse_text(part: Mapping[str, Any], key: str, where: str, *, strict: bool) -> Text:
    if part.get("type", key) != key:
        raise InputError(f"{where}.type is {part['type']!r}, but the item has the key {key!r}")
    unknown = (name for name in part if name not in ("type", key))
    pass_over(unknown, where, "text has no options", strict=strict, foreign=())
    if not isinstance(part[key], str):
        raise InputError(f"{where}.{key} is {type_of(part[key])}; it must be a string")
    return Text(require_unicode(part[key], f"{where}.{key}"))


def _parse_source(value: Any, key: str, kind: Kind, where: str, *, may_lack_data: bool) -> tuple[Any, dict[str, Any]]:
    """Return the source under `key` and the options inside it, such as `detail` in OpenAI's `image_url`.

    The source is None if it is left out.
    """
    nested: dict[str, Any] = {}
    if isinstance(value, Mapping):
        value, nested = _unwrapped(value, key, kind, where, may_lack_data=may_lack_data)
    if isinstance(value, Embeddings) or (value is None and may_lack_data):
        return value, nested
    if kind == "video" and (frames := _frames(value)) is not None:
        if not frames:
            raise InputError(f"{where} is an empty list; a video must have at least one frame")
        if len(frames) > MAX_LISTED_FRAMES:
            raise LimitExceeded(f"{where} has more frames than the limit of {MAX_LISTED_FRAMES} for a list")
        return tuple(_parse_value(frame, key, f"{where}[{index}]") for index, frame in enumerate(frames)), nested
    return _parse_value(value, key, where), nested


def _grid_keys(kind: Kind) -> tuple[str, ...]:
    return () if kind == PROMPT else (GRID, *filter(None, [GRID_KEYS.get(kind)]))


def _parse_embeddings(
    value: Any, beside: Mapping[str, Any], kind: Kind, where: str, *, may_lack_data: bool
) -> Embeddings | Any:
    """Return embeddings in memory as Embeddings, and a file as its path or bytes.

    Return None if the data are left out. If the grid is a file, too, return both files.

    Args:
        value: The embeddings, or a dict with them and with their grid.
        beside: The grid, if it is given beside `value`.
        kind: Kind of the item.
        where: Name of the value in error messages.
        may_lack_data: Whether the data may be left out.

    """
    key, grids = EMBEDDINGS_KEYS[kind], dict(beside)
    if isinstance(value, Mapping):
        known = (key, *_grid_keys(kind))
        given = {name: one for name, one in value.items() if one is not None}
        if (unknown := next((name for name in given if name not in known), None)) is not None:
            raise InputError(f"{where} has the unknown key {str(unknown)[:40]!r}; it may have {' and '.join(known)}")
        value = given.pop(key, None)
        grids |= given
    if len(grids) > 1:
        raise InputError(f"{where} has {' and '.join(grids)}; give only one grid")
    name, grid = next(iter(grids.items()), (GRID, None))
    if value is None and grid is None and may_lack_data:
        return None
    if isinstance(value, Embeddings) and not grid_given(grid):
        return value
    if _is_array(value) or (isinstance(value, list | tuple) and all(map(_is_array, value))):
        with naming(where):
            return Embeddings(value.array if isinstance(value, Embeddings) else value, () if grid is None else grid)
    files = (value,) if grid is None else (value, grid)
    for file, what in zip(files, (where, f"{where} is a file, but its {name}"), strict=False):
        if not isinstance(file, (str, bytes, bytearray, memoryview, io.BytesIO, os.PathLike)):
            raise InputError(
                f"{what} is {type_of(file)}; it must be base64 of safetensors or of torch.save's output, a file, or "
                "an array"
            )
    if len(files) > 1 and name == GRID:
        raise InputError(f"{where} is a file, whose grid cannot be given as {name}; pass the tensor in the file")
    parsed = tuple(_parse_value(file, key, where) for file in files)
    return parsed if len(parsed) > 1 else parsed[0]


def _is_array(value: Any) -> bool:
    return isinstance(value, Embeddings) or hasattr(value, "shape")


def _unwrapped(
    wrapped: Mapping[str, Any], key: str, kind: Kind, where: str, *, may_lack_data: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the source inside a dict, or None if it is left out, and the options beside it."""
    inner = "data" if key == "input_audio" else "url"
    value = wrapped.get(inner)
    nested = {name: option for name, option in wrapped.items() if name != inner and option is not None}
    if key == "input_audio":
        nested.pop("format", None)
    if value is None and may_lack_data:
        return None, nested
    if not isinstance(value, (str, list, tuple) if kind == "video" else str):
        taken = "a string, or a list of frames" if kind == "video" else "a string"
        raise InputError(f"{where}.{inner} is {type_of(value)}; it must be {taken}")
    return _as_url(value) if key == "input_audio" and isinstance(value, str) else value, nested


def _frames(value: Any) -> Sequence[Any] | None:
    """Return the frames of a video that is a list of frames, or None for a video that is one file.

    For a URL with too many frames, return `MAX_LISTED_FRAMES` + 1 frames. The last one is the rest of the URL.
    """
    if isinstance(value, str) and value[: len(_JPEG_FRAMES)].lower() == _JPEG_FRAMES:
        frames = value[len(_JPEG_FRAMES) :].split(",", MAX_LISTED_FRAMES)
        return [f"data:image/jpeg;base64,{frame}" for frame in frames]
    return value if isinstance(value, (list, tuple)) else None


def _as_url(text: str) -> str:
    """Return base64 as a `data:` URL. Return a URL, as in DashScope's `input_audio`, unchanged."""
    return text if ":" in text[:_MAX_SCHEME] else f"data:;base64,{text}"


def _parse_value(value: Any, key: str, where: str) -> Any:
    if key == "base64" and isinstance(value, str):
        value = _as_url(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if not isinstance(value, (str, bytes)) and not hasattr(value, "__array__") and not hasattr(value, "getexif"):
        raise InputError(f"{where} is {type_of(value)}; it must be a path, bytes, a PIL image, an array or a URL")
    if isinstance(value, (str, bytes)) and not value:
        raise InputError(f"{where} is empty")
    return value
