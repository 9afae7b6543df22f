"""Limits on media (MediaCaps) in a context variable, so that model families need not pass them when they open media."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

import msgspec

from mindie_mm.errors import LimitExceeded
from mindie_mm.settings.config import MediaCaps

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class VideoSample(msgspec.Struct, frozen=True, array_like=True):
    """The frames that are sampled from an encoded video."""

    num_frames: _Number
    """Number of frames of the video."""
    fps: float | None
    """Average number of frames per second, or None if it is unknown."""
    indices: tuple[_Number, ...]
    """Ascending indices of the sampled frames."""
    num_bytes: _Number
    """Size in bytes of the sampled frames as RGB pixels of the size that they have in the video."""


@dataclass(slots=True, eq=False)
class Work:
    """Amount of decoding work for the media of one request that have been opened so far."""

    caps: MediaCaps
    limits_request_pixels: bool = True
    """True if `max_request_pixels` applies."""
    image_pixels: int = 0
    """Number of pixels of images, including video frames that are images."""
    video_pixels: int = 0
    """Number of pixels of decoded video frames, including frames between the sampled frames."""
    is_rgb: bool = True
    """True if Pillow's mode of all images is RGB. Other images are converted when they are decoded."""
    sample: VideoSample | None = None
    """Sample of the encoded video that was sampled last."""

    def add_image(self, pixels: int) -> None:
        """Count the pixels of an image. Raise LimitExceeded if the images of the request have too many pixels."""
        self.image_pixels += pixels
        if self.limits_request_pixels and self.image_pixels > (limit := self.caps.max_request_pixels):
            raise LimitExceeded(
                f"the request's images and frames have at least {self.image_pixels} pixels in total; the "
                f"limit is {limit} (--max-request-pixels)"
            )

    def add_video(self, pixels: int) -> None:
        """Count pixels of a video that are to be decoded. Raise LimitExceeded if the request has too many of them."""
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
    """Return the Work object of the current request. Outside `under`, return a new object with the default limits."""
    return _work.get() or Work(_DEFAULTS)


def caps() -> MediaCaps:
    """Return the limits of this context. Outside `under`, return the default limits."""
    return work().caps


def length_text(length_s: float, limit_s: float) -> str:
    """Return a length in seconds as a string with enough digits to show that it exceeds a limit, and at least one."""
    texts = (f"{length_s:.{digits}f}" for digits in range(1, 16))
    return next((text for text in texts if float(text) > limit_s), repr(length_s)) + " s"


def check_pixels(width: int, height: int) -> None:
    """Raise LimitExceeded if an image of this size has more pixels than `max_image_pixels`."""
    max_pixels = caps().max_image_pixels
    if width * height > max_pixels:
        raise LimitExceeded(f"the image has {width}x{height} = {width * height} pixels; the limit is {max_pixels}")


def add_image(width: int, height: int) -> None:
    """Count an image that is to be decoded. Raise LimitExceeded if the image or the request has too many pixels."""
    check_pixels(width, height)
    work().add_image(width * height)


@contextmanager
def under(these: MediaCaps, *, limits_request_pixels: bool = True) -> Iterator[Work]:
    """Apply the limits `these` to all media that are opened inside this context. These media count as one request.

    The limits still apply when the media are decoded after the context has exited.

    Yields:
        The Work object of the request.

    """
    of_request = Work(these, limits_request_pixels)
    token = _work.set(of_request)
    try:
        yield of_request
    finally:
        _work.reset(token)


@contextmanager
def decoding_to_count() -> Iterator[None]:
    """Decode each video and clip that is opened inside this context to count its frames, instead of its packets."""
    token = _decodes_to_count.set(True)
    try:
        yield
    finally:
        _decodes_to_count.reset(token)


def decodes_to_count() -> bool:
    """Return whether this context is inside `decoding_to_count`."""
    return _decodes_to_count.get()
