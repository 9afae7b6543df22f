"""What a Matroska or WebM file says of compressed tracks, looked at before FFmpeg unpacks them.

FFmpeg unpacks each block as it looks for packets, 10 MB from 9 KB, of tracks too that nobody reads, and passes over
those that fail: no count of packets sees them all. Elements and their names: RFC 9559.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindie_mm.errors import LimitExceeded, MediaError

MAX_ELEMENTS = 2**14
"""Most elements that are read, of all descriptions of tracks: 256 for each of 64 tracks."""
MAX_PREFIX = 64
"""Most bytes that are put before each frame, of a track that leaves out what its frames begin with."""

_TRACKS, _TRACK, _TYPE = b"\x16\x54\xae\x6b", b"\xae", b"\x83"
_ENCODINGS, _ENCODING, _COMPRESSION = b"\x6d\x80", b"\x62\x40", b"\x50\x34"
_ALGORITHM, _PREFIX = b"\x42\x54", b"\x42\x55"
_NOTHING = b"\x6d\x81"
"""The name of no element, as long as that of the encodings: readers pass over it."""
_PREFIXED = 3
"""The algorithm that only leaves out what each frame begins with. The others are those of archives."""
_VIDEO = 1
Span = tuple[int, int]
"""Start and stop of bytes."""


def without_compression(data: bytes) -> bytes:
    """`data`; where tracks of Matroska other than video are compressed, a copy that does not say so.

    Subtitles often are, and are not read. MediaError for video that is, LimitExceeded.
    """
    reader, copy, place = _Reader(data), None, -1
    while (place := data.find(_TRACKS, place + 1)) >= 0:  # wherever they are: FFmpeg goes where an index says
        _, tracks = next(reader.elements((place, len(data)), _TRACKS), (0, (0, 0)))
        for name in reader.compressed(tracks):
            copy = copy or bytearray(data)
            copy[name : name + len(_NOTHING)] = _NOTHING
    return data if copy is None else bytes(copy)


class _Reader:
    """Reads elements, and counts them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_read = 0

    def compressed(self, tracks: Span) -> Iterator[int]:
        """Where the encodings that unpack are named. MediaError for those of video, LimitExceeded."""
        for _, track in self.elements(tracks, _TRACK):
            for name, encodings in self.elements(track, _ENCODINGS):
                if self._unpacks(encodings):
                    if _VIDEO in self._numbers(track, _TYPE):
                        raise MediaError("the container's video is compressed as in an archive, which is not read")
                    yield name

    def elements(self, span: Span, name: bytes) -> Iterator[tuple[int, Span]]:
        """Where those of that name start, and their content. LimitExceeded."""
        place, stop = span
        while place < stop:
            self._num_read += 1
            if self._num_read > MAX_ELEMENTS:
                raise LimitExceeded(f"the container's tracks have more than {MAX_ELEMENTS} elements, the limit")
            at = place + _num_bytes(self._data, place)
            start = at + _num_bytes(self._data, at)
            if at - place > 4 or start - at > 8:
                return
            most = (1 << 7 * (start - at)) - 1
            size = int.from_bytes(self._data[at:start]) & most
            # The most that there can be is an unknown size: FFmpeg goes on within, up to what belongs further out.
            end = stop if size == most else min(start + size, stop)
            if self._data[place:at] == name:
                yield place, (start, end)
            place = start if size == most else end

    def _unpacks(self, encodings: Span) -> bool:
        """Whether they are more than short beginnings that were left out."""
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
    """Bytes of the number at `place`, by the zeros that its first begins with; 9 for what is none."""
    return 9 - int.from_bytes(data[place : place + 1]).bit_length()
