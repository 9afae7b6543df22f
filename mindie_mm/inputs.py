"""The `List[Dict]` contract: what a caller may hand in, checked once, at the border.

Each dict has exactly one of `text`, `image`, `video`, `audio`, plus per-item options. A media value is a path,
bytes, a PIL image or an array, or a `data:`, `http(s):` or `file:` URL; a video may be a list of these too, its frames.
The parts of OpenAI and Hugging Face chat messages (`{"type": "image_url", "image_url": {"url": ...}}`,
`{"type": "image", "image": ...}`) mean the same items.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from mindie_mm.errors import InputError, LimitExceeded

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of chat messages. A closed set: some templates build special tokens out of the role's name."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text, tokenised as plain text: no special token can come out of it."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Per-item preprocessing options; None means the checkpoint's own value."""

    min_pixels: int | None = None
    """Least pixels of the resized image or frame."""
    max_pixels: int | None = None
    """Most pixels of the resized image or frame."""
    fps: float | None = None
    """Frames sampled per second of video; excludes `num_frames`."""
    num_frames: int | None = None
    """Frames sampled, evenly over the video; excludes `fps`."""
    min_frames: int | None = None
    """Least frames sampled, of a video that has them."""
    max_frames: int | None = None
    """Most frames sampled."""
    sample_fps: float | None = None
    """Frames per second that a video handed in as frames was sampled at; None: not known."""
    detail: str | None = None
    """OpenAI's `auto`, `low`, `high` or `original`; `low` bounds the image to 512 x 512 pixels."""
    sampling_rate: int | None = None
    """Samples a second of sound handed in as an array; None: as many as the model takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Features that a tower gave before, in place of a medium. For callers of the library; HTTP carries none."""

    array: Any
    """float16 or float32 [features, width], as the model's tower gives them for one item."""
    grid: tuple[int, ...] = ()
    """The family's geometry of the item, where its prompt or positions depend on it, as in `Plan.grid`."""

    def __post_init__(self) -> None:
        shape, dtype = getattr(self.array, "shape", ()), str(getattr(self.array, "dtype", "no array"))
        if len(shape) != 2 or 0 in shape or dtype not in {"float16", "float32"}:
            raise InputError(
                f"embeddings are {dtype} of shape {tuple(shape)}; they must be a numpy array, float16 or float32 "
                "[features, width]"
            )
        if not abs(float(self.array.astype("float64").sum())) < math.inf:
            raise InputError("embeddings hold numbers that are not finite")
        if not all(type(number) is int for number in self.grid):
            raise InputError(f"the embeddings' grid {self.grid} must consist of integers")


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or an audio clip."""

    kind: Kind
    source: Any
    """A path, bytes, PIL image, array, URL text, or Embeddings; a tuple of these but the last: a video's frames."""
    options: MediaOptions = field(default_factory=MediaOptions)


Item = Text | Media
Paths = Path | list[Path]
"""A media item's file, or those of its frames."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """One of `ROLES`."""
    content: str | tuple[Item, ...] | None
    """A text, or items in order; None where the message has none (an assistant's tool calls)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the message holds (`name`, `tool_calls`...), handed to the chat template."""


_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels", "detail"),
    "video": ("min_pixels", "max_pixels", "fps", "num_frames", "min_frames", "max_frames", "sample_fps", "detail"),
    "audio": ("sampling_rate",),
}
_ORDERED = (
    ("min_pixels", "max_pixels"),
    ("min_frames", "max_frames"),
    ("min_frames", "num_frames"),
    ("num_frames", "max_frames"),
)
_SOURCES: Mapping[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Possessive, so that a long run without its end is given up at once.
_WEBUI_IMAGE = re.compile(r'<img src="(data:image/jpeg;base64,[A-Za-z0-9+/=]++)">')
_TEXTS = ("text", "refusal")
"""Keys of a text; the second is OpenAI's, in an assistant's earlier turns."""
_BARE_SOURCES = ("url", "path", "base64")
_HINTS = frozenset({"cache_control", "uuid"})
"""Keys for other servers' caches, which are passed over: here an item is known by its content."""
_DETAILS = ("auto", "low", "high", "original")
OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a field that are as good as none."""
PROMPT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("continue_final_message", "chat_template", "documents", "functions"), OFF),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), OFF),
    "function_call": (None, "none", "auto"),
    # vLLM's word for what the context holds: no prompt that is taken here changes by it.
    "truncate_prompt_tokens": (*OFF, -1),
}
"""Fields of vLLM's and OpenAI's requests that would make another prompt, and the values of each that would not."""
MAX_LISTED_FRAMES = 2048
"""Most frames of a video that is given as a list of them."""
_MAX_LISTED_IN_ALL = 2**15
"""Most frames of all lists of a call, bounded while they are parsed: a comma of a URL costs a client less than us."""
_JPEG_FRAMES = "data:video/jpeg;base64,"
"""What vLLM's URL of frames begins with; their base64 follows, with commas between them."""
_MAX_PIXELS = 2**31
_MAX_FRAMES = 2**20
_MAX_FPS = 1000.0
_MAX_SAMPLING_RATE = 768_000


def media_of(items: Sequence[Item]) -> list[Media]:
    """The media among `items`, in order."""
    return [item for item in items if isinstance(item, Media)]


def media_of_messages(messages: Sequence[Message]) -> list[Media]:
    """The media of `messages`, in order."""
    return [media for m in messages if isinstance(m.content, tuple) for media in media_of(m.content)]


def parse_inputs(inputs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The items of a `List[Dict]`, in order. InputError names the index, the key and the limit."""
    return list(_parse_parts(inputs, "inputs"))


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages, OpenAI or Hugging Face style. InputError names the message, the part and the limit."""
    _require_list(messages, "messages")
    parsed: list[Message] = []
    num_frames = 0
    for index, message in enumerate(messages):
        parsed.append(_parse_message(message, f"messages[{index}]"))
        num_frames = _add_frames(num_frames, media_of_messages(parsed[-1:]), "messages")
    return parsed


def with_paths(items: Sequence[Item], paths: Iterator[Paths]) -> list[dict[str, Any]]:
    """The `List[Dict]` that parse_inputs makes `items` of, but with the next of `paths` as each medium's source."""
    return [_with_path(item, paths) for item in items]


def messages_with_paths(messages: Sequence[Message], paths: Iterator[Paths]) -> list[dict[str, Any]]:
    """The chat messages that parse_messages makes `messages` of, but with the next of `paths` as above."""
    return [
        {
            **message.extra,
            "role": message.role,
            "content": with_paths(message.content, paths) if isinstance(message.content, tuple) else message.content,
        }
        for message in messages
    ]


def template_variables(
    given: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    reasoning_effort: Any = None,
) -> dict[str, Any]:
    """What a chat template gets beside the messages: `given`, tools and effort. InputError for a choice not served."""
    if tool_choice not in (None, "auto", "none"):
        raise InputError("tool_choice must be 'auto' or 'none': no call is enforced")
    if not isinstance(reasoning_effort, str | None):
        raise InputError(f"reasoning_effort is {reasoning_effort!r}, it must be a word")
    variables = dict(given or {})
    if tools and tool_choice != "none":
        variables["tools"] = tools
    if reasoning_effort:
        variables["reasoning_effort"] = reasoning_effort
    return variables


def refused_fields(given: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Which of `fields` are `given` with none of the values that stand there."""
    return [
        name
        for name, value in given.items()
        if name in fields and not any(type(value) is type(one) and value == one for one in fields[name])
    ]


def from_webui_prompt(prompt: str, max_images: int) -> list[Item]:
    """The items of a prompt in text-generation-webui's form: `<img src="data:image/jpeg;base64,...">` is a picture.

    Exactly so; whatever differs from it in one character is text. What stands behind `base64,` is not decoded here.
    LimitExceeded at the first one above `max_images`.
    """
    items: list[Item] = []
    stop = 0
    for index, match in enumerate(_WEBUI_IMAGE.finditer(prompt)):
        if index == max_images:
            raise LimitExceeded(f"the prompt has more pictures than the limit of {max_images}")
        items += [Text(_require_unicode(prompt[stop : match.start()], "the prompt")), Media("image", match[1])]
        stop = match.end()
    items.append(Text(_require_unicode(prompt[stop:], "the prompt")))
    return [item for item in items if item != Text("")]


def _with_path(item: Item, paths: Iterator[Paths]) -> dict[str, Any]:
    if isinstance(item, Text):
        return {"text": item.text}
    options = {name: value for name, value in asdict(item.options).items() if value is not None}
    path = next(paths)
    return {item.kind: list(map(str, path)) if isinstance(path, list) else str(path), **options}


def _parse_message(message: Mapping[str, Any], where: str) -> Message:
    _require_dict(message, where)
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content in ([], ()) and message.get("tool_calls"):
        content = None
    if isinstance(content, str):
        _require_unicode(content, f"{where}.content")
    elif content is not None:
        content = _parse_parts(content, f"{where}.content")
    if content is None and role != "assistant":
        raise InputError(f"{where} has no content")
    extra = {key: value for key, value in message.items() if key not in {"role", "content"} and value is not None}
    if "tool_calls" in extra:
        extra["tool_calls"] = _parse_tool_calls(extra["tool_calls"], f"{where}.tool_calls")
    return Message(role, content, extra)


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as chat templates read them: their arguments an object, which OpenAI's clients send as its JSON.

    A text that is none stays as the model wrote it: it may have been told so since, and is to mend it.
    """
    if not isinstance(calls, (list, tuple)):
        raise InputError(f"{where} is {_type(calls)}; it must be a list")
    return [_parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    _require_dict(call, where)
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments") or "{}", str):
        return dict(call)
    _require_unicode(text, f"{where}.function.arguments")
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
        msgspec.msgpack.encode(arguments)  # they go to another process, where an integer has 64 bits
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, OverflowError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_parts(parts: Sequence[Mapping[str, Any]], where: str) -> tuple[Item, ...]:
    _require_list(parts, where)
    items: list[Item] = []
    num_frames = 0
    for index, part in enumerate(parts):
        items.append(_parse_part(part, f"{where}[{index}]"))
        num_frames = _add_frames(num_frames, media_of(items[-1:]), where)
    return tuple(items)


def _add_frames(num_frames: int, media: Sequence[Media], where: str) -> int:
    """`num_frames` and those that `media` lists. LimitExceeded."""
    num_frames += sum(len(item.source) for item in media if isinstance(item.source, tuple))
    if num_frames > _MAX_LISTED_IN_ALL:
        raise LimitExceeded(f"{where} has lists of more than {_MAX_LISTED_IN_ALL} frames in all, the limit")
    return num_frames


def _parse_part(part: Mapping[str, Any], where: str) -> Item:
    _require_dict(part, where)
    part = {key: value for key, value in part.items() if key not in _HINTS}
    declared = part.get("type")
    if declared is not None and not isinstance(declared, str):
        raise InputError(f"{where}.type is {_type(declared)}; it must be a string")
    keys = [key for key in part if key in _TEXTS or key in _SOURCES]
    if not keys and declared in KINDS:
        keys = [key for key in part if key in _BARE_SOURCES]
    if len(keys) != 1:
        found = " and ".join(map(repr, keys)) if keys else f"none in {sorted(map(str, part))}"
        raise InputError(f"{where} must have exactly one of text, image, video, audio; found {found}")
    key = keys[0]
    if key in _TEXTS:
        return _parse_text(part, key, where)
    kind: Kind = _SOURCES.get(key, declared)  # type: ignore[arg-type] # a bare source has its kind declared
    if declared is not None and _SOURCES.get(declared) != kind:
        raise InputError(f"{where}.type is {declared!r}, but the item holds {key!r}")
    options = {name: value for name, value in part.items() if name not in {"type", key}}
    source, nested = _parse_source(part[key], key, kind, f"{where}.{key}")
    if both := options.keys() & nested.keys():
        raise InputError(f"{where} gives {min(both)!r} twice, beside {key!r} and inside it")
    return Media(kind, source, _parse_options(kind, options | nested, where))


def _parse_text(part: Mapping[str, Any], key: str, where: str) -> Text:
    if part.get("type", key) != key:
        raise InputError(f"{where}.type is {part['type']!r}, but the item holds {key!r}")
    if unknown := part.keys() - {"type", key}:
        raise InputError(f"{where} has the unknown key {min(map(str, unknown))!r}; a text takes no options")
    if not isinstance(part[key], str):
        raise InputError(f"{where}.{key} is {_type(part[key])}; it must be a string")
    return Text(_require_unicode(part[key], f"{where}.{key}"))


def _parse_source(value: Any, key: str, kind: Kind, where: str) -> tuple[Any, dict[str, Any]]:
    """The source under `key`, and the options given inside it, as OpenAI's `image_url` has `detail`."""
    nested: dict[str, Any] = {}
    if isinstance(value, Embeddings):
        return value, nested
    if isinstance(value, Mapping):
        inner = "data" if key == "input_audio" else "url"
        if not isinstance(value.get(inner), (str, list, tuple) if kind == "video" else str):
            taken = "a string, or a list of frames" if kind == "video" else "a string"
            raise InputError(f"{where}.{inner} is {_type(value.get(inner))}; it must be {taken}")
        nested = {name: option for name, option in value.items() if name != inner}
        value = value[inner]
        if key == "input_audio":
            nested.pop("format", None)
            value = f"data:;base64,{value}"
    if kind == "video" and (frames := _frames(value)) is not None:
        if not frames:
            raise InputError(f"{where} is an empty list; a video has at least one frame")
        if len(frames) > MAX_LISTED_FRAMES:
            raise LimitExceeded(f"{where} has more than {MAX_LISTED_FRAMES} frames, the limit of a list")
        return tuple(_parse_value(frame, key, f"{where}[{index}]") for index, frame in enumerate(frames)), nested
    return _parse_value(value, key, where), nested


def _frames(value: Any) -> Sequence[Any] | None:
    """The frames that a video is given as, at least one too many where there are; None for a video that is one file."""
    if isinstance(value, str) and value[: len(_JPEG_FRAMES)].lower() == _JPEG_FRAMES:
        frames = value[len(_JPEG_FRAMES) :].split(",", MAX_LISTED_FRAMES)
        return [f"data:image/jpeg;base64,{frame}" for frame in frames]
    return value if isinstance(value, (list, tuple)) else None


def _parse_value(value: Any, key: str, where: str) -> Any:
    if key == "base64" and isinstance(value, str):
        value = f"data:;base64,{value}"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if not isinstance(value, (str, bytes)) and not hasattr(value, "__array__") and not hasattr(value, "getexif"):
        raise InputError(f"{where} is {_type(value)}; it must be a path, bytes, a PIL image, an array or a URL")
    if isinstance(value, (str, bytes)) and not value:
        raise InputError(f"{where} is empty")
    return value


def _parse_options(kind: Kind, given: Mapping[str, Any], where: str) -> MediaOptions:
    allowed = _OPTIONS[kind]
    if unknown := [name for name in given if name not in allowed]:
        known = ", ".join(allowed)
        raise InputError(f"{where} has the unknown key {unknown[0]!r}; an item of kind {kind}: it takes {known}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "detail":
            if value not in _DETAILS:
                raise InputError(f"{where}.detail is {value!r}; it must be one of {', '.join(_DETAILS)}")
            values[name] = value
        elif name in {"fps", "sample_fps"}:
            values[name] = _number(value, 0.0, _MAX_FPS, f"{where}.{name}")
        elif name == "sampling_rate":
            values[name] = _integer(value, 1, _MAX_SAMPLING_RATE, f"{where}.{name}")
        else:
            limit = _MAX_PIXELS if name.endswith("pixels") else _MAX_FRAMES
            values[name] = _integer(value, 1, limit, f"{where}.{name}")
    options = MediaOptions(**values)
    _require_order(options, where)
    return options


def _require_order(options: MediaOptions, where: str) -> None:
    for low, high in _ORDERED:
        least, most = getattr(options, low), getattr(options, high)
        if least is not None and most is not None and least > most:
            raise InputError(f"{where}: {low} {least} is above {high} {most}")
    if options.fps is not None and options.num_frames is not None:
        raise InputError(f"{where} gives both fps and num_frames; one excludes the other")


def _integer(value: Any, low: int, high: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where} is {value!r}; it must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise InputError(f"{where} is {value}; it must be from {low} to {high}")
    return value


def _number(value: Any, above: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} is {value!r}; it must be a number")
    if not math.isfinite(value) or not above < value <= high:
        raise InputError(f"{where} is {value}; it must be above {above:g} and at most {high:g}")
    return float(value)


def _require_list(value: Any, where: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{where} is {_type(value)}; it must be a list of dicts")
    if not value:
        raise InputError(f"{where} is an empty list; it must hold at least one dict")


def _require_dict(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {_type(value)}; it must be a dict")


def _require_unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds a lone surrogate at character {error.start}") from None
    return text


def _type(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
