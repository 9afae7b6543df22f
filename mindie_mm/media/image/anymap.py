"""Decoder of portable anymaps: PBM, PGM, PPM, and PFM with a single channel.

Pillow decodes these formats in Python, one sample at a time, which is too slow. The formats are specified at
netpbm.sourceforge.net/doc/pbm.html and on the neighboring pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard.caps import add_image, work
from mindie_mm.media.image.colours import scaled_floats, scaled_integers

ANYMAP_START = re.compile(rb"P[1-6f][\s#]")
MAX_COMMENTS = 1000
"""Maximum number of comments between the samples of a plain (text) anymap."""
_MAX_HEAD = 2**16
"""Maximum size of a header in bytes, including comments."""
_GAP = rb"(?:\s|#[^\r\n]*+[\r\n])++"
_NUMBER = _GAP + rb"([0-9]{1,10})"
_HEADS = (
    re.compile(rb"P([14])" + 2 * _NUMBER + rb"\s"),
    re.compile(rb"P([2356])" + 3 * _NUMBER + rb"\s"),
    re.compile(rb"P(f)" + 2 * _NUMBER + _GAP + rb"([-+]?[0-9.eE+-]{1,30})\s"),
)
_COMMENT = re.compile(rb"#[^\r\n]*+")
_WHITE_SPACE = b" \t\n\v\f\r"
_BLANKS = bytes.maketrans(_WHITE_SPACE, b" " * len(_WHITE_SPACE))
_PIECE_BYTES = 2**20


def _raster_bytes(kind: bytes, width: int, height: int, scale: bytes) -> int:
    """Return the size of the binary samples of PBM, PGM and PPM. For other kinds, which have one image, return 0."""
    if kind == b"4":
        return -(-width // 8) * height
    channels = {b"5": 1, b"6": 3}.get(kind, 0)
    return channels * width * height * (1 if channels and int(scale) < 256 else 2)


@dataclass(frozen=True, slots=True)
class Anymap:
    """A portable anymap whose header has been read and checked against the limits. The samples are not decoded yet."""

    height: int
    width: int
    kind: bytes
    """The digit or letter after the P in the magic number."""
    scale: bytes
    """Maximum sample value. For PFM, a number whose sign indicates the byte order. Empty for PBM."""
    raster: memoryview

    @classmethod
    def open(cls, data: bytes) -> Anymap:
        """Read the header of `data`.

        Raises:
            MediaError: The header is malformed.
            LimitExceeded: The image has too many pixels or comments.

        """
        head = data[:_MAX_HEAD]
        match = next(filter(None, (pattern.match(head) for pattern in _HEADS)), None)
        if match is None:
            raise MediaError(
                f"the {len(data)} bytes cannot be read as an image (a portable anymap without a valid header)"
            )
        width, height = int(match[2]), int(match[3])
        if not width or not height:
            raise MediaError(
                f"the portable anymap has {width}x{height} pixels; its width and height must be at least 1"
            )
        if match[1] in b"123" and (num_comments := data.count(b"#", match.end())) > MAX_COMMENTS:
            raise LimitExceeded(f"the portable anymap has {num_comments} comments; the limit is {MAX_COMMENTS}")
        add_image(width, height)
        work().is_rgb &= match[1] in b"36"
        scale = match[4] if match.re.groups == 4 else b""
        if (nbytes := _raster_bytes(match[1], width, height, scale)) and ANYMAP_START.match(data, match.end() + nbytes):
            raise MediaError("the portable anymap has several images; send each image as a file")
        return cls(height, width, match[1], scale, memoryview(data)[match.end() :])

    def decode(self) -> NDArray[np.uint8]:
        """Return RGB pixels, uint8 [height, width, 3].

        Raises:
            MediaError: The image is broken or truncated.

        """
        try:
            grey_or_rgb = self._samples()
        except (ValueError, OverflowError):
            raise MediaError(
                f"the portable anymap of {self.width}x{self.height} pixels is broken or truncated"
            ) from None
        return np.ascontiguousarray(np.broadcast_to(grey_or_rgb, (self.height, self.width, 3)))

    def _samples(self) -> NDArray[np.uint8]:
        """Return uint8 [height, width, 1 or 3]. Raise ValueError if the samples are broken."""
        if self.kind in b"14":
            return self._bits()
        if self.kind == b"f":
            scale = float(self.scale)
            floats = self._binary("<f4" if scale < 0 else ">f4", 1)
            return scaled_floats(floats[::-1])  # PFM stores the bottom row first
        most = int(self.scale)
        if not 1 <= most <= 65535:
            raise ValueError(most)
        channels = 3 if self.kind in b"36" else 1
        plain = self.kind in b"23"
        samples = self._plain(channels) if plain else self._binary("u1" if most < 256 else ">u2", channels)
        values = np.minimum(samples, most)
        if most == 255:
            as_they_are: NDArray[np.uint8] = values.astype(np.uint8)
            return as_they_are
        if most == 65535:  # writers state 65535 even if the samples have fewer bits
            return scaled_integers(values, None)
        table = np.rint(np.arange(most + 1) * 255 / most).astype(np.uint8)
        scaled: NDArray[np.uint8] = table[values]
        return scaled

    def _bits(self) -> NDArray[np.uint8]:
        """Return 255 (white) for each 0 bit and 0 (black) for each 1 bit."""
        num_pixels = self.height * self.width
        if self.kind == b"4":
            row_bytes = -(-self.width // 8)
            packed = np.frombuffer(self.raster, np.uint8, self.height * row_bytes).reshape(self.height, row_bytes)
            bits = np.unpackbits(packed, axis=1)[:, : self.width]
        else:
            digits = _COMMENT.sub(b"", self.raster).translate(None, _WHITE_SPACE)
            bits = np.frombuffer(digits, np.uint8, num_pixels) - ord("0")
        if bits.max() > 1:
            raise ValueError("the portable anymap has a sample that is neither 0 nor 1")
        white: NDArray[np.uint8] = (1 - bits.reshape(self.height, self.width, 1)) * np.uint8(255)
        return white

    def _binary(self, dtype: str, channels: int) -> NDArray[Any]:
        shape = self.height, self.width, channels
        return np.frombuffer(self.raster, dtype, self.height * self.width * channels).reshape(shape)

    def _plain(self, channels: int) -> NDArray[Any]:
        shape = self.height, self.width, channels
        count = self.height * self.width * channels
        text = _COMMENT.sub(b" ", self.raster).translate(_BLANKS)
        if 2 * count - 1 > len(text) or text.translate(None, b" 0123456789"):
            raise ValueError("the portable anymap has too few samples, or a sample that is not a number")
        values, num_found, start = np.empty(count, np.int64), 0, 0
        while num_found < count and start < len(text):
            # Parse the samples in pieces, because a list of all samples would take 40 bytes per sample.
            stop = (text.find(b" ", start + _PIECE_BYTES) + 1) or len(text)
            piece = list(map(int, text[start:stop].split()))[: count - num_found]
            values[num_found : num_found + len(piece)] = piece
            num_found, start = num_found + len(piece), stop
        if num_found < count:
            raise ValueError("the portable anymap has too few samples")
        return values.reshape(shape)
