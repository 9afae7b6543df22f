"""Caps on media, held in a context variable so that model families can open media without passing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from mindie_mm.errors import LimitExceeded
from mindie_mm.settings.config import MediaCaps


@dataclass(slots=True, eq=False)
class Work:
    """Decoding work of all media of one request that have been opened."""

    caps: MediaCaps
    picture_pixels: int = 0
    """Number of pixels of images, including video frames that are images."""
    video_pixels: int = 0
    """Number of pixels of decoded frames of encoded videos, including frames between the sampled ones."""

    def add_picture(self, pixels: int) -> None:
        """Count the pixels of an image. Raise LimitExceeded if the images of the request have too many."""
        self.picture_pixels += pixels
        if self.picture_pixels > (limit := self.caps.max_request_pixels):
            raise LimitExceeded(
                f"the request's images and frames have at least {self.picture_pixels} pixels in total; the "
                f"limit is {limit} (--max-request-pixels)"
            )

    def add_video(self, pixels: int) -> None:
        """Count pixels of a video that will be decoded. Raise LimitExceeded if the request would decode too many."""
        self.video_pixels += pixels
        if self.video_pixels > (limit := self.caps.max_request_video_pixels):
            raise LimitExceeded(
                f"at least {self.video_pixels} pixels of the request's videos would be decoded, including the "
                f"frames between the sampled ones; the limit is {limit} (--max-request-video-pixels)"
            )


_DEFAULTS = MediaCaps()
_work: ContextVar[Work | None] = ContextVar("media_work", default=None)
_decodes_to_count: ContextVar[bool] = ContextVar("decodes_to_count", default=False)


def work() -> Work:
    """Return the work of the current request, or a new one with default caps outside `under`."""
    return _work.get() or Work(_DEFAULTS)


def caps() -> MediaCaps:
    """Return the caps of this context, or the defaults outside `under`."""
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
def under(these: MediaCaps) -> Iterator[Work]:
    """Apply the caps `these` to all media opened inside this context, which count as one request.

    Opened media keep these caps when they are decoded later. The context manager yields the work of this request.
    """
    of_request = Work(these)
    token = _work.set(of_request)
    try:
        yield of_request
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
