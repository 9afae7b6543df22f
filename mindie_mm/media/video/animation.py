"""Animated PNG and WebP images as videos, and a test for still images, which are no videos.

Pillow decodes the animations, because FFmpeg does not decode animated WebP.

The frames and their durations are counted in the file. The W3C's PNG specification (third edition) defines animated
PNG, and RFC 9649 defines WebP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.document.tiff import is_tiff
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.boxes import J2K_START, JP2_START, MAX_BOXES, boxes
from mindie_mm.media.guard.caps import Work, length_text, work
from mindie_mm.media.guard.segments import JPEG_START, PNG_START
from mindie_mm.media.image.anymap import ANYMAP_START
from mindie_mm.media.image.colours import ORIENTATION_TAG, pil_to_rgb
from mindie_mm.media.image.encoded_image import EncodedImage, Pixels
from mindie_mm.media.image.icons import ICON_START

_DEFAULT_DENOMINATOR = 100
"""Denominator of a duration in a PNG if the file states 0."""
_ANIMATED = 0x02
"""Flag of an animation in the header of a WebP."""
_STILL_STARTS = (JPEG_START, PNG_START, ICON_START, JP2_START, J2K_START)


def is_animation(data: bytes) -> bool:
    """Return whether `data` is an animated PNG or WebP image."""
    if data.startswith(PNG_START):
        return 0 < data.find(b"acTL") < data.find(b"IDAT")
    return data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and bool(data[20:21] and data[20] & _ANIMATED)


def is_still(data: bytes) -> bool:
    """Return whether `data`, which is no animation, is an image of a format other than GIF.

    FFmpeg would read the first tile of a HEIC image as a video. A file is an image or a video in GIF according to its
    number of frames.
    """
    if data[4:8] == b"ftyp":  # HEIC and AVIF. Animations and videos have a movie box
        kinds = {kind for kind, _, _ in islice(boxes(data, 0, len(data)), MAX_BOXES)}
        return b"meta" in kinds and b"moov" not in kinds
    is_webp, is_bitmap = data[:4] == b"RIFF" and data[8:12] == b"WEBP", data[:2] == b"BM" and not any(data[15:18])
    return is_webp or is_bitmap or is_tiff(data) or data.startswith(_STILL_STARTS) or bool(ANYMAP_START.match(data))


@dataclass(frozen=True, slots=True, eq=False)
class Animation:
    """An animated image, with the same interface as an EncodedVideo."""

    height: int
    """Height in pixels of a frame."""
    width: int
    """Width in pixels of a frame."""
    num_frames: int
    """Number of frames in the file."""
    fps: float | None
    """Average number of frames per second. None if all durations are 0."""
    data: bytes
    work: Work
    """Decoding work of the request that the animation belongs to."""

    @classmethod
    def open(cls, data: bytes) -> Animation:
        """Read the durations of the frames of `data`.

        Raises:
            MediaError: The image is not readable, or it is truncated.
            LimitExceeded: The image exceeds a limit.

        """
        of_request = work()
        limits = of_request.caps
        image = EncodedImage.open(data)
        width, height = image.file.size
        found = _png_durations(data) if data.startswith(PNG_START) else _webp_durations(data)
        declared = getattr(image.file, "n_frames", 1) - bool(image.file.info.get("default_image"))
        image.file.close()
        durations = [*islice(found, min(declared, limits.max_video_frames + 1))]
        num_frames, lasts = len(durations), sum(durations, Fraction())
        if num_frames > limits.max_video_frames:
            raise LimitExceeded(f"the video has {num_frames} frames; the limit is {limits.max_video_frames}")
        if lasts > limits.max_video_seconds:
            length = length_text(float(lasts), limits.max_video_seconds)
            raise LimitExceeded(f"the video lasts {length}; the limit is {limits.max_video_seconds:g} s")
        if width * height > limits.max_video_pixels:
            raise LimitExceeded(
                f"the video has {width}x{height} = {width * height} pixels; the limit is {limits.max_video_pixels}"
            )
        if num_frames < declared:
            raise MediaError(
                f"the animation is truncated: its header declares {declared} frames, but it has {num_frames}"
            )
        return cls(height, width, num_frames, float(num_frames / lasts) if lasts else None, data, of_request)

    def count(self, indices: Sequence[int]) -> None:
        """Count the pixels that `decode` will decode for `indices`.

        They count as pixels of images, because they take as much time.

        Raises:
            LimitExceeded: The request would decode too many pixels.

        """
        self.work.add_image((indices[-1] + 1) * self.height * self.width)

    def decode(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield the frame for each of the ascending `indices` as RGB pixels, uint8 [height, width, 3].

        Raises:
            MediaError: The animation is broken.

        """
        image = EncodedImage.open(self.data)
        first = int(bool(image.file.info.get("default_image")))
        try:
            for index in indices:
                cancellation.check()
                yield self._frame(image, first + index)
        finally:
            image.file.close()

    def _frame(self, image: EncodedImage, place: int) -> Pixels:
        try:
            image.file.seek(place)
            image.file.getexif().pop(ORIENTATION_TAG, None)  # browsers do not turn animations
            return np.asarray(pil_to_rgb(image.file, image.background, image.significant_bits))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - for broken data, a decoder may raise any exception
            raise MediaError(f"the animation is broken: frame {place} cannot be decoded") from None


def _png_durations(data: bytes) -> Iterator[Fraction]:
    """Yield the duration in seconds of each frame of an animated PNG."""
    place = len(PNG_START)
    while place + 8 <= len(data):
        size, kind = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8]
        if kind == b"fcTL":
            amount, unit = (int.from_bytes(data[at : at + 2]) for at in (place + 28, place + 30))
            yield Fraction(amount, unit or _DEFAULT_DENOMINATOR)
        place += 12 + size


def _webp_durations(data: bytes) -> Iterator[Fraction]:
    """Yield the duration in seconds of each frame of an animated WebP."""
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] == b"ANMF":
            yield Fraction(int.from_bytes(data[place + 20 : place + 23], "little"), 1000)
        place += 8 + size + size % 2
