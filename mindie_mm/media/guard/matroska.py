"""Detection of compressed tracks in Matroska and WebM files, before FFmpeg decompresses the tracks.

FFmpeg decompresses each block while it searches for packets, even blocks of tracks that are not read. A block of 9 KB
may become 10 MB. FFmpeg skips blocks that it cannot decompress, so a limit on packets does not apply to such blocks.
RFC 9559 defines the elements and their IDs.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded, MediaError

MAX_ELEMENTS = 2**14
"""Maximum number of elements to read in all track descriptions: 256 for each of 64 tracks."""
MAX_PREFIX = 64
"""Maximum size in bytes of a stripped header, which FFmpeg inserts again before each frame of the track."""

_TRACKS, _TRACK, _TYPE = b"\x16\x54\xae\x6b", b"\xae", b"\x83"
_ENCODINGS, _ENCODING, _COMPRESSION = b"\x6d\x80", b"\x62\x40", b"\x50\x34"
_ALGORITHM, _PREFIX = b"\x42\x54", b"\x42\x55"
_NOTHING = b"\x6d\x81"
"""Unassigned element ID with the same length as _ENCODINGS. Readers skip unknown elements."""
_PREFIXED = 3
"""Value of ContentCompAlgo for header stripping. Other values mean compression algorithms such as zlib."""
_VIDEO = 1
Span = tuple[int, int]
"""Start and stop offsets in bytes."""


def without_compression(data: bytes) -> bytes:
    """Hide the encodings of compressed tracks from FFmpeg.

    Return `data` itself if no track is compressed, otherwise a changed copy. Compressed tracks are usually subtitles,
    which this package does not read.

    Raises:
        MediaError: A video track is compressed.
        LimitExceeded: The track descriptions have more than `MAX_ELEMENTS` elements.

    """
    reader, copy, place = _Reader(data), None, -1
    while (place := data.find(_TRACKS, place + 1)) >= 0:  # at any position, because FFmpeg follows an index
        _, tracks = next(reader.elements((place, len(data)), _TRACKS), (0, (0, 0)))
        for name in reader.compressed(tracks):
            copy = copy or bytearray(data)
            copy[name : name + len(_NOTHING)] = _NOTHING
    return data if copy is None else bytes(copy)


class _Reader:
    """A reader of elements that limits their total number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_read = 0

    def compressed(self, tracks: Span) -> Iterator[int]:
        """Yield the offset of each ContentEncodings element that needs decompression.

        Raise MediaError if the element belongs to a video track.
        """
        for _, track in self.elements(tracks, _TRACK):
            for name, encodings in self.elements(track, _ENCODINGS):
                if self._unpacks(encodings):
                    if _VIDEO in self._numbers(track, _TYPE):
                        raise MediaError(
                            "the container compresses its video tracks with a general-purpose algorithm, which is "
                            "not supported"
                        )
                    yield name

    def elements(self, span: Span, name: bytes) -> Iterator[tuple[int, Span]]:
        """Yield the offset and the content of each element `name` in `span`.

        Raise LimitExceeded if this object has read too many elements.
        """
        place, stop = span
        while place < stop:
            self._num_read += 1
            if self._num_read > MAX_ELEMENTS:
                raise LimitExceeded(f"the container's tracks have more elements than the limit of {MAX_ELEMENTS}")
            at = place + _num_bytes(self._data, place)
            start = at + _num_bytes(self._data, at)
            if at - place > 4 or start - at > 8:
                return
            most = (1 << 7 * (start - at)) - 1
            size = int.from_bytes(self._data[at:start]) & most
            # The largest value means that the size is unknown. FFmpeg then reads up to the next element of an outer
            # level.
            end = stop if size == most else min(start + size, stop)
            if self._data[place:at] == name:
                yield place, (start, end)
            place = start if size == most else end

    def _unpacks(self, encodings: Span) -> bool:
        """Return whether the encodings include anything other than short stripped headers."""
        for _, encoding in self.elements(encodings, _ENCODING):
            algorithms: set[int] = set()
            for _, compression in self.elements(encoding, _COMPRESSION):
                algorithms |= self._numbers(compression, _ALGORITHM)
                if any(stop - start > MAX_PREFIX for _, (start, stop) in self.elements(compression, _PREFIX)):
                    return True
            if algorithms != {_PREFIXED}:
                return True
        return False

    def _numbers(self, span: Span, name: bytes) -> set[int]:
        return {int.from_bytes(self._data[start:stop]) for _, (start, stop) in self.elements(span, name)}


def _num_bytes(data: bytes, place: int) -> int:
    """Return the length in bytes of the variable-size integer at `place`, or 9 if its first byte is 0 or missing."""
    return 9 - int.from_bytes(data[place : place + 1]).bit_length()
