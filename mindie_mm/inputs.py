"""The `List[Dict]` contract: what a caller may hand in, checked once, at the border.

Each dict has exactly one of `text`, `image`, `video`, `audio`, plus per-item options. A media value is a path,
bytes, a PIL image or an array, or a `data:`, `http(s):` or `file:` URL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text, tokenised as plain text: no special token can come out of it."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Per-item preprocessing options; None means the checkpoint's own value."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or an audio clip."""

    kind: Kind
    source: Any
    """A path, bytes, PIL image, array, or URL text."""
    options: MediaOptions = field(default_factory=MediaOptions)


Item = Text | Media
