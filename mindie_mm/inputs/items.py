"""What callers hand in, checked: texts and media, and chat messages of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mindie_mm.errors import InputError

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""Roles of chat messages. A closed set: some templates build special tokens out of the role's name."""
ROLES: tuple[Role, ...] = get_args(Role)
Detail = Literal["auto", "low", "high", "original"]


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
    detail: Detail | None = None
    """OpenAI's hint. Families that resize to any size bound
    the image to 512 x 512 pixels at `low`; the others pass it over."""
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


def media_of(items: Sequence[Item]) -> list[Media]:
    """The media among `items`, in order."""
    return [item for item in items if isinstance(item, Media)]


def media_of_messages(messages: Sequence[Message]) -> list[Media]:
    """The media of `messages`, in order."""
    return [media for m in messages if isinstance(m.content, tuple) for media in media_of(m.content)]


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


def _with_path(item: Item, paths: Iterator[Paths]) -> dict[str, Any]:
    if isinstance(item, Text):
        return {"text": item.text}
    options = {name: value for name, value in asdict(item.options).items() if value is not None}
    path = next(paths)
    return {item.kind: list(map(str, path)) if isinstance(path, list) else str(path), **options}
