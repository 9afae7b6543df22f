"""Limits on the sample tables of MP4 files, checked before FFmpeg builds an index from them.

A file of 3 KB can describe an index of several gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import LimitExceeded, MediaError

MAX_TABLES = 2**19
"""Maximum number of sample tables in an MP4. This suffices for four hours with one fragment per frame."""
MAX_BOXES = 2**17
"""Maximum number of top-level boxes in an MP4: two for each of 65,000 fragments.

FFmpeg takes more than a second to read so many boxes.
"""
MAX_INDEX = 2**25
"""Maximum total size in bytes of all boxes that may contain tables.

A frame takes about 30 bytes, and a fragment 200 bytes. A cover picture takes as many bytes as its file.
"""
EDITS_OF_ALL = 16
"""Maximum number of edits if each edit has as many samples as the container has bytes.

FFmpeg copies the index for each edit.
"""
_PIECE = 160
"""Minimum number of audio samples in a piece. FFmpeg may cut chunks into pieces instead of reading sample sizes."""
_READ = frozenset(
    b"moov moof trak mdia minf stbl mvex traf tref dinf edts udta meta ilst sinf schi wave stsd iprp ipco cmov hoov "
    b"free stsz stz2 trun sidx".split()
)
"""Top-level boxes in which FFmpeg finds sample tables, even if the standard does not allow this. Media data are not
included."""
_UPRIGHT = struct.pack(">5i", 1 << 16, 0, 0, 0, 1 << 16)
"""First five entries of the identity matrix. Only these entries can rotate or mirror."""
_MATROSKA_POSES = tuple(name + size for name in (b"\x76\x73", b"\x76\x75") for size in (b"\x84", b"\x88"))
"""Element IDs and sizes of ProjectionPoseYaw, which mirrors frames, and ProjectionPoseRoll, which rotates frames.

Other data may contain the same bytes. The only effect of a false match is that the file is read once more.
"""
_MATROSKA_HEAD = 2**16
"""Number of bytes at the start of a Matroska file in which to search for track entries."""
Span = tuple[int, int]
"""Start and stop offsets in bytes."""


def check_tables(data: bytes) -> None:
    """Check that an MP4 does not state more samples than it has bytes. Files of other formats pass.

    This check is needed because FFmpeg builds an index of all samples when it opens the file. The check searches for
    the names of tables instead of following the boxes, because FFmpeg finds tables inside more kinds of boxes than the
    standard allows.

    Raises:
        LimitExceeded: There are too many tables or top-level boxes, the tables are too large or overlap, or they state
            too many samples or edits.
        MediaError: The index is compressed, as in QuickTime 3, so that its tables cannot be checked.

    """
    spans = _read_spans(data)
    num_pieces = _stated_pieces(data, spans)
    # The maximum and not the sum: for each track, FFmpeg either reads sizes or cuts pieces. The sizes of PCM samples
    # alone already add up to all bytes.
    stated = max(_stated_samples(data, spans), num_pieces, _grouped_samples(data, spans))
    if stated > len(data):
        raise LimitExceeded(f"the container declares {stated} samples, more than its {len(data)} bytes can hold")
    edits = sum(_number(data, place + 4) for place in _places(data, b"elst", spans))
    num_sized = (_number(data, place + 8) for kind in (b"stsz", b"stz2") for place in _places(data, kind, spans))
    if edits * (num_samples := num_pieces + sum(num_sized)) > EDITS_OF_ALL * len(data):
        raise LimitExceeded(
            f"the container declares {edits} edits and {num_samples} samples, too many for a file of {len(data)} bytes"
        )
    if any(True for _ in _places(data, b"cmov", spans)):
        raise MediaError("the container's index is compressed, which is not supported")


def may_be_turned(data: bytes) -> bool:
    """Return whether a container may state a rotation or mirroring of its frames.

    MP4 describes the rotation or mirroring with a matrix, and Matroska with a projection pose.
    """
    head = data[:_MATROSKA_HEAD]
    if any(pose in head for pose in _MATROSKA_POSES):
        return True
    spans = _read_spans(data)
    for kind, place_of_matrix in ((b"tkhd", (40, 52)), (b"mvhd", (36, 48))):
        for place in _places(data, kind, spans):
            matrix = place + place_of_matrix[data[place : place + 1] == b"\1"]
            if data[matrix : matrix + 20] != _UPRIGHT:
                return True
    return False


def _stated_samples(data: bytes, spans: Sequence[Span]) -> int:
    """Return the number of samples that tables state. Each sample takes at least one byte of data or of its table."""
    stated = sum(_number(data, place + 4) for place in _places(data, b"trun", spans))
    stated += sum(_number(data, place + 8) for place in _places(data, b"stz2", spans))
    for place in _places(data, b"stsz", spans):
        stated += (_number(data, place + 4) or 1) * _number(data, place + 8)
    return stated


def _stated_pieces(data: bytes, spans: Sequence[Span]) -> int:
    """Return an upper bound for the number of audio pieces without sizes.

    FFmpeg does not read sizes if all samples have a duration of 1.
    """
    times = ((_number(data, place + 4), _number(data, place + 12)) for place in _places(data, b"stts", spans))
    # FFmpeg treats a negative duration as 1.
    if not any(count == 1 and (lasts == 1 or lasts >= 2**31) for count, lasts in times):
        return 0
    num_chunks = sum(_number(data, place + 4) for kind in (b"stco", b"co64") for place in _places(data, kind, spans))
    num_chunks = min(num_chunks, len(data) // 4)
    tables = _tables(data, b"stsc", 3, spans)
    return sum(num_chunks * int(table[:, 1].max(initial=0)) // _PIECE for table in tables)


def _grouped_samples(data: bytes, spans: Sequence[Span]) -> int:
    """Return the number of samples in groups plus the number of samples with composition offsets.

    If there are no groups, return 0, because FFmpeg creates lists of both only if there are groups.
    """
    grouped = sum(int(table[:, 0].sum(dtype=np.uint64)) for table in _tables(data, b"sbgp", 2, spans))
    return grouped and grouped + sum(
        int(table[:, 0].sum(dtype=np.uint64)) for table in _tables(data, b"ctts", 2, spans)
    )


def _tables(data: bytes, kind: bytes, width: int, spans: Sequence[Span]) -> Iterator[NDArray[np.uint32]]:
    """Yield the entries of each box `kind`, uint32 [entries, width].

    Raise LimitExceeded if the entries of all boxes together need more bytes than the file has.
    """
    num_entries = 0
    for place in _places(data, kind, spans):
        begin = place + 8
        if kind == b"sbgp":
            begin += 8 if data[place : place + 1] == b"\1" else 4
        count = min(_number(data, begin - 4), max(0, len(data) - begin) // (4 * width))
        num_entries += count
        if 4 * width * num_entries > len(data):
            raise LimitExceeded(f"the container's tables overlap: its {len(data)} bytes cannot hold all of them")
        if count:
            yield np.frombuffer(data, ">u4", width * count, begin).reshape(count, width)


def _places(data: bytes, kind: bytes, spans: Sequence[Span]) -> Iterator[int]:
    """Yield the offset after each occurrence of `kind`, at which the content of a box may begin.

    Raise LimitExceeded if there are more than `MAX_TABLES`.
    """
    num_places = 0
    for start, stop in spans:
        place = start
        while (place := data.find(kind, place, stop)) >= 0:
            place += 4
            num_places += 1
            if num_places > MAX_TABLES:
                raise LimitExceeded(f"the container has more sample tables than the limit of {MAX_TABLES}")
            yield place


def _number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4])


def _read_spans(data: bytes) -> list[Span]:
    """Return the spans in which FFmpeg reads boxes of an MP4, or the whole file if the spans are uncertain.

    The list is empty for other formats. The spans exclude media data, which contain the name of a table by chance once
    in 2**32 bytes.

    Raises:
        LimitExceeded: There are more than `MAX_BOXES` top-level boxes, or more than `MAX_INDEX` bytes in the spans.

    """
    starts, spans = list[int](), list[Span]()
    place, end = 0, len(data)
    while place + 8 <= end:
        size, kind, head = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[place + 8 : place + 16]), 16
        if size and size < head:
            break
        if len(starts) == MAX_BOXES:
            raise LimitExceeded(f"the container has more top-level boxes than the limit of {MAX_BOXES}")
        starts.append(place)
        stop = min(place + size, end) if size else end
        if kind in _READ:
            spans.append((place, stop))
        place = stop
    if (num_bytes := sum(stop - start for start, stop in spans)) > MAX_INDEX:
        raise LimitExceeded(f"the container's index has {num_bytes} bytes; the limit is {MAX_INDEX}")
    certain = _stays_within(data, spans) and _reads_in_order(data, spans, {*starts, end})
    return spans if certain else [(0, end)]


def _stays_within(data: bytes, spans: Sequence[Span]) -> bool:
    """Return whether all sample entries and item properties end inside their span.

    FFmpeg reads them even beyond the end of the enclosing box.
    """
    num_entries = 0
    for start, stop in spans:
        for place in _places(data, b"ipco", [(start, stop)]):
            if place - 8 + _number(data, place - 8) > stop:
                return False
        for place in _places(data, b"stsd", [(start, stop)]):
            entry = place + 8
            for _ in range(_number(data, place + 4)):
                entry += max(8, _number(data, entry))
                num_entries += 1
                if entry > stop or num_entries > MAX_BOXES:
                    return False
    return True


def _reads_in_order(data: bytes, spans: Sequence[Span], starts: AbstractSet[int]) -> bool:
    """Return whether FFmpeg reads boxes only at `starts`.

    FFmpeg jumps to the positions of fragments that a segment index (sidx) states.
    """
    if all(data.find(b"sidx", start, stop) < 0 for start, stop in spans):
        return True
    num_fragments = 0
    for start, stop in spans:
        if any(data.find(kind, start + 8, stop) >= 0 for kind in (b"sidx", b"moof")):
            return False
        if data[start + 4 : start + 8] == b"sidx":
            width = 8 if data[start + 8 : start + 9] != b"\0" else 4  # size of a time in bytes, by version
            first = start + 24 + 2 * width
            place = stop + int.from_bytes(data[first - 4 - width : first - 4])
            count = int.from_bytes(data[first - 2 : first])
            num_fragments += count
            if num_fragments > MAX_BOXES or first + 12 * count > stop:
                return False
            for (size,) in struct.iter_unpack(">I8x", data[first : first + 12 * count]):
                if place < len(data) and place not in starts:
                    return False
                place += size & 0x7FFFFFFF
    return True
