"""Checked inputs: texts, media, and chat messages that contain them."""

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
"""Roles of chat messages that every service knows."""
ROLES: tuple[Role, ...] = get_args(Role)
CUSTOM_ROLE = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"
"""Pattern of any other role. The chat template decides whether it takes the role."""
DOCUMENT = "document"
"""Key of a PDF in a `List[Dict]`."""
Detail = Literal["auto", "low", "high", "original"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text. It is tokenised as plain text and never becomes a special token."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Preprocessing options of an item. None stands for the value of the checkpoint."""

    min_pixels: int | None = None
    """Minimum number of pixels of the resized image or frame."""
    max_pixels: int | None = None
    """Maximum number of pixels of the resized image or frame."""
    fps: float | None = None
    """Number of frames sampled per second of video. Excludes `num_frames`."""
    num_frames: int | None = None
    """Number of frames sampled at even distances. Excludes `fps`."""
    min_frames: int | None = None
    """Minimum number of frames sampled, if the video has that many."""
    max_frames: int | None = None
    """Maximum number of frames sampled."""
    sample_fps: float | None = None
    """Rate in frames per second at which a list of frames was sampled, or None if unknown."""
    detail: Detail | None = None
    """OpenAI's hint for the resolution.

    With `low`, families that resize to any size limit an image to 512 x 512 pixels. Other families ignore the hint.
    """
    sampling_rate: int | None = None
    """Sampling rate in Hz of an array of samples, or None for the rate of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Features from an earlier run of a tower, in place of a medium.

    Only the Python interface accepts them. HTTP requests cannot carry them.
    """

    array: Any
    """Output of the model's tower for one item, float16 or float32 [features, width]."""
    grid: tuple[int, ...] = ()
    """Geometry of the item as in `Plan.grid`, if the prompt or the positions of the family depend on it."""

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
    """A path, URL, bytes, PIL image, array or Embeddings. A tuple, without Embeddings, holds the frames of a video."""
    options: MediaOptions = field(default_factory=MediaOptions)
    is_document: bool = False
    """True for a PDF, which becomes one image per page (`Media.page`) before the prompt is made."""
    page: int | None = None
    """Page of the PDF `source` that is the image, from 0, or None if the source is an image."""


Item = Text | Media
Paths = Path | list[Path]
"""The file of a media item, or the files of its frames."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """One of `ROLES`, or a role of the chat template's own."""
    content: str | tuple[Item, ...] | None
    """A text, or items in order. None if there is no content, as in an assistant's tool calls."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the message, such as `name` and `tool_calls`. They are passed to the chat template."""


def media_of(items: Sequence[Item]) -> list[Media]:
    """Return the media among `items`, in order."""
    return [item for item in items if isinstance(item, Media)]


def media_of_messages(messages: Sequence[Message]) -> list[Media]:
    """Return the media of `messages`, in order."""
    return [media for m in messages if isinstance(m.content, tuple) for media in media_of(m.content)]


def with_paths(items: Sequence[Item], paths: Iterator[Paths]) -> list[dict[str, Any]]:
    """Return the `List[Dict]` that `parse_inputs` parses to `items`, with the source of each medium replaced by a path.

    Args:
        items: Parsed items.
        paths: Iterator of which one element is taken for each medium.

    """
    return [_with_path(item, paths) for item in items]


def messages_with_paths(messages: Sequence[Message], paths: Iterator[Paths]) -> list[dict[str, Any]]:
    """Return the chat messages that `parse_messages` parses to `messages`, with paths as in `with_paths`."""
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
    if item.is_document:
        return {DOCUMENT: str(path), **options}
    return {item.kind: list(map(str, path)) if isinstance(path, list) else str(path), **options}
