"""The caps under which media are opened. Families open media without knowing of them, so they are of the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from mindie_mm.config import MediaCaps
from mindie_mm.errors import LimitExceeded


@dataclass(slots=True, eq=False)
class Work:
    """What the media of one request, as far as they are opened, take to decode."""

    caps: MediaCaps
    picture_pixels: int = 0
    """Pixels of images, and of frames handed in as images."""
    video_pixels: int = 0
    """Pixels of the frames of encoded videos that are decoded, those between the sampled ones included."""

    def add_picture(self, pixels: int) -> None:
        """LimitExceeded where the request's pictures have more pixels than the limit."""
        self.picture_pixels += pixels
        if self.picture_pixels > (limit := self.caps.max_request_pixels):
            raise LimitExceeded(
                f"the request's images have {self.picture_pixels} pixels or more, those of frames included; "
                f"the limit is {limit}"
            )

    def add_video(self, pixels: int) -> None:
        """LimitExceeded where more pixels of the request's videos would be decoded than the limit."""
        self.video_pixels += pixels
        if self.video_pixels > (limit := self.caps.max_request_video_pixels):
            raise LimitExceeded(
                f"of the request's videos {self.video_pixels} pixels or more would be decoded, frames between the "
                f"sampled ones included; the limit is {limit}"
            )


_DEFAULTS = MediaCaps()
_work: ContextVar[Work | None] = ContextVar("media_work", default=None)
_decodes_to_count: ContextVar[bool] = ContextVar("decodes_to_count", default=False)


def work() -> Work:
    """What this context's request takes so far; of nobody's request where nobody set caps, and under the defaults."""
    return _work.get() or Work(_DEFAULTS)


def caps() -> MediaCaps:
    """The caps of this context; the defaults where nobody set any."""
    return work().caps


def check_pixels(width: int, height: int) -> None:
    """Raise LimitExceeded if an image of this size has more pixels than `max_image_pixels`."""
    max_pixels = caps().max_image_pixels
    if width * height > max_pixels:
        raise LimitExceeded(f"the image has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")


def add_picture(width: int, height: int) -> None:
    """Count an image that will be decoded. Raise LimitExceeded if it or the request has too many pixels."""
    check_pixels(width, height)
    work().add_picture(width * height)


@contextmanager
def under(these: MediaCaps) -> Iterator[None]:
    """Has media opened inside under `these`, as those of one request.

    What was opened keeps them, however late it is decoded.
    """
    token = _work.set(Work(these))
    try:
        yield
    finally:
        _work.reset(token)


@contextmanager
def decoding_to_count() -> Iterator[None]:
    """Make each video opened inside this context count its frames by decoding them instead of by its packets."""
    token = _decodes_to_count.set(True)
    try:
        yield
    finally:
        _decodes_to_count.reset(token)


def decodes_to_count() -> bool:
    """Return whether this context is inside `decoding_to_count`."""
    return _decodes_to_count.get()
