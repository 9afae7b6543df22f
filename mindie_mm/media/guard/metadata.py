"""Limits on the metadata of media files, checked before FFmpeg reads the files. FFmpeg itself has no such limits.

FFmpeg compares the name of each tag with all earlier names, so a megabyte of names takes minutes. Tags are counted
wherever they occur inside their parent element. Going from one tag to the next would not be reliable, because readers
do not agree where a broken tag ends. RFC 9559 defines the elements of Matroska, section 5.2 of the Vorbis I
specification defines comments, and id3.org defines ID3.

This module counts only names to which the limits in `container` do not apply: names that FFmpeg compares without
reading data in between, and names after the first frames. The time limit in `container` applies to names in RIFF, CAF,
Wave64, SPHERE and ASF, and the limit on bytes applies to cover pictures and attached files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from mindie_mm.errors import LimitExceeded, MediaError

MAX_TAGS = 2**12
"""Maximum number of tags, chapters or attached files."""
MAX_PLACES = 2**17
"""Maximum number of index or chapter entries in Matroska. This suffices for an hour with one entry per frame."""
MAX_PAGES = 2**19
"""Maximum number of pages in Ogg. This suffices for about three hours with one page of 128 bytes per 20 ms."""
MAX_MAKER = 128
"""Maximum size in bytes of the vendor string, which precedes the number of comments in Ogg.

With this limit, the bytes of the number are contiguous, because the first 255 bytes of a packet are always on the same
page.
"""

_MATROSKA = b"\x1a\x45\xdf\xa3"
_COUNTED = (
    ("tags", b"\x12\x54\xc3\x67", b"\x73\x73", MAX_TAGS),
    ("tags", b"\x12\x54\xc3\x67", b"\x67\xc8", MAX_TAGS),
    ("chapters", b"\x10\x43\xa7\x70", b"\x73\xc4", MAX_TAGS),
    ("chapters", b"\x10\x43\xa7\x70", b"\xb6", MAX_PLACES),
    ("attached files", b"\x19\x41\xa4\x69", b"\x61\xa7", MAX_TAGS),
    ("cues", b"\x1c\x53\xbb\x6b", b"\xbb", MAX_PLACES),
    ("cues", b"\x1c\x53\xbb\x6b", b"\xb7", MAX_PLACES),
)
"""Elements to count: name in error messages, ID of the parent element, ID of the element, and maximum number."""
_BY_CHANCE = 192
"""For elements with the limit `MAX_PLACES`, the limit is raised by 1 for each 192 bytes of the file.

The IDs of these elements have one byte, so media data contain an ID by chance once in 256 bytes.
"""
_FLAC_COMMENTS = 4
_ID3 = re.compile(rb"ID3[\2-\4].{2}([\0-\x7f]{4})", re.DOTALL)
_ID3_CHUNKS = (b"ID3 ", b"id3 ")
_FRAME = re.compile(rb"T[A-Z0-9]{2}|PRIV|GEO|PIC|CHAP|ULT|USLT|COM|WXX")
_MP4_TAGS = (b"----\0", b"mdta")
"""Beginnings of MP4 tags with arbitrary names. FFmpeg supports only a few other tag names."""
_FLV_SCRIPT = re.compile(rb"onMetaData|onCuePoint")
_AMF_BYTES = {0: 8, 1: 1, 5: 0, 6: 0, 11: 10, 13: 0}
"""Size in bytes of AMF0 values with a fixed size, by type marker. Other values are strings, objects and arrays."""
_AMF_TEXT, _AMF_OBJECT, _AMF_NAMED_ARRAY, _AMF_ARRAY = 2, 3, 8, 10
_COMMENTS = (b"OpusTags", b"\3vorbis", b"\x81theora")
"""Beginnings of comments in Ogg. There is one search for each, because a search for all takes ten times as long."""
_PAGE = b"OggS\0"
_OGG_FLAC = b"\x7fFLAC"
_OGG_UNREAD = (
    b"Speex   ",
    b"CELT    ",
    b"OVP80",
    b"\x80daala",
    b"\1video\0",
    b"\1audio\0",
    b"\1text\0",
    b"Direct Show Sam",
)
"""Beginnings of unsupported Ogg streams. Their comments cannot be counted, because they have no marker."""


def check_metadata(data: bytes) -> None:
    """Check the number of tags, chapters, cues and attached files of a media file.

    Raises:
        LimitExceeded: The file has too many tags, chapters, cues or attached files.
        MediaError: An Ogg file has an unsupported stream whose comments cannot be counted.

    """
    if _MATROSKA in data[: 2**12]:
        for what, holder, name, limit in _COUNTED:
            by_chance = len(data) // _BY_CHANCE if limit == MAX_PLACES else 0
            _check(what, sum(data.count(name, *span) for span in _spans(data, holder)), limit + by_chance)
    for name in _MP4_TAGS:
        _check("tags", data.count(name), MAX_TAGS)
    if data.startswith(b"FLV"):
        _check_flv(data)
    place = _check_id3(data, 0)
    if data[:4] in (b"RIFF", b"FORM", b"RF64"):  # search for tags, because a search for chunk names takes 0.3 s
        tags = (tag.start() for tag in _ID3.finditer(data))
        for start in islice((at for at in tags if data[at - 8 : at - 4] in _ID3_CHUNKS), MAX_TAGS):
            _check_id3(data, start)
    if data[place : place + 4] == b"fLaC":
        _check_flac(data, place + 4)
    elif data[place : place + 4] == b"OggS":
        _check_ogg(data)


def _check(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise LimitExceeded(f"the container has {number} {what}; the limit is {limit}")


def _spans(data: bytes, holder: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of the content of each element `holder`, without overlaps.

    Media data contain the ID of `holder` by chance once in 2**32 bytes.
    """
    place, done, num_found = -1, 0, 0
    while (place := data.find(holder, place + 1)) >= 0:
        num_found += 1
        _check("lists of the same kind", num_found, MAX_TAGS)
        start, stop = _content(data, place + len(holder))
        if stop > max(start, done):
            yield max(start, done), stop
            done = stop


def _content(data: bytes, place: int) -> tuple[int, int]:
    """Return the start and stop of an element's content. `place` is the offset of the element's size.

    `stop` is at most the size of `data`.
    """
    width = 9 - int.from_bytes(data[place : place + 1]).bit_length()
    most = (1 << 7 * width) - 1
    size = int.from_bytes(data[place : place + width]) & most
    return place + width, len(data) if size == most else min(place + width + size, len(data))


def _check_id3(data: bytes, place: int) -> int:
    """Check the ID3 tags at `place` and return the offset at which they end."""
    num_tags = 0
    while tag := _ID3.match(data, place):
        size = 0
        for byte in tag[1]:
            size = size << 7 | byte
        start, place = tag.end(), min(tag.end() + size, len(data))
        num_tags += 1 + sum(1 for _ in islice(_FRAME.finditer(data, start, place), MAX_TAGS + 1))
        _check("or more ID3 tags", num_tags, MAX_TAGS)
    return place


def _check_ogg(data: bytes) -> None:
    num_comments = 0
    for start in _ogg_comments(data):
        _check("bytes in its vendor string", int.from_bytes(data[start : start + 4], "little"), MAX_MAKER)
        num_comments += _num_comments(data, start)
        _check("comments", num_comments, MAX_TAGS)


def _places(data: bytes, name: bytes) -> Iterator[int]:
    """Yield the offset of each occurrence of `name`. A search with `re` would take ten times as long."""
    place = -1
    while (place := data.find(name, place + 1)) >= 0:
        yield place


def _ogg_comments(data: bytes) -> Iterator[int]:
    """Yield the offset of each list of comments. Raise MediaError for a stream whose comments cannot be found."""
    for name in _COMMENTS:
        yield from islice((at + len(name) for at in _places(data, name)), MAX_TAGS)
    is_flac, num_pieces = False, 0
    for num_before, page in enumerate(_places(data, _PAGE)):
        _check("or more pages", num_before, MAX_PAGES)
        sizes = data[page + 27 : page + 27 + int.from_bytes(data[page + 26 : page + 27])]
        start = page + 27 + len(sizes)
        if data.startswith(_OGG_UNREAD, start):
            raise MediaError("the container has a stream with a codec that is not supported")
        is_flac = is_flac or data.startswith(_OGG_FLAC, start)
        num_pieces += len(sizes) if is_flac else 0
        _check("page segments", num_pieces, MAX_PAGES)
        is_first = True
        for size in sizes if is_flac else b"":
            if is_first and data[start : start + 1] in (b"\4", b"\x84"):  # an audio packet would begin with FF
                yield start + 4
            start += size
            is_first = size < 255


def _check_flac(data: bytes, place: int) -> None:
    num_blocks = num_comments = 0
    is_last = False
    while not is_last and place + 4 <= len(data):
        is_last, kind = data[place] >= 0x80, data[place] & 0x7F
        num_blocks += 1
        _check("metadata blocks", num_blocks, MAX_TAGS)
        num_comments += _num_comments(data, place + 4) if kind == _FLAC_COMMENTS else 0
        _check("comments", num_comments, MAX_TAGS)
        place += 4 + int.from_bytes(data[place + 1 : place + 4])


def _check_flv(data: bytes) -> None:
    num_values = num_names = 0
    for script in _FLV_SCRIPT.finditer(data):
        for is_named in _amf_values(data, script.end()):
            num_values += 1
            num_names += is_named
            _check("or more tags", num_names, MAX_TAGS)
            _check("or more tag values", num_values, MAX_PLACES)


def _amf_values(data: bytes, place: int) -> Iterator[bool]:
    """Yield whether a value has a name, first for the value at `place`, then for each value inside it."""
    unnamed: list[int | None] = [1]  # number of values left in each open array; None for an object, which names values
    while unnamed and place < len(data):
        if (left := unnamed[-1]) is None:
            size = int.from_bytes(data[place : place + 2])
            place += 2 + size
            if not size:
                unnamed.pop()
                place += 1  # there is a type marker at the end of an object, too
                continue
        elif left:
            unnamed[-1] = left - 1
        else:
            unnamed.pop()
            continue
        yield left is None
        kind = data[place] if place < len(data) else -1
        place += 1
        if kind in (_AMF_OBJECT, _AMF_NAMED_ARRAY):
            place += 4 * (kind == _AMF_NAMED_ARRAY)
            unnamed.append(None)
        elif kind == _AMF_ARRAY:
            unnamed.append(int.from_bytes(data[place : place + 4]))
            place += 4
        elif kind == _AMF_TEXT:
            place += 2 + int.from_bytes(data[place : place + 2])
        elif kind in _AMF_BYTES:
            place += _AMF_BYTES[kind]
        else:
            return


def _num_comments(data: bytes, place: int) -> int:
    """Return the number of comments, which is stated after the vendor string at `place`."""
    place += 4 + int.from_bytes(data[place : place + 4], "little")
    return int.from_bytes(data[place : place + 4], "little")
