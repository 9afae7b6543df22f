"""Boxes of HEIF files, the container of HEIC images.

ISO/IEC 14496-12 defines the boxes of items, and ISO/IEC 23008-12 the properties and derived images.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mindie_mm.media.guard.boxes import boxes

_FILES, _ITEMS = 0, 1  # construction methods: offsets in the file, and in the box idat
_IMAGE_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"mif1", b"hevc", b"hevx", b"msf1"})


class Cursor:
    """Reader of big-endian integers. Reading past the end raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, nbytes: int) -> bytes:
        if self.place + nbytes > len(self.data):
            raise ValueError("a box ends too early")
        self.place += nbytes
        return self.data[self.place - nbytes : self.place]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes))


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a HEIF file, by item id, and their properties and references."""

    data: bytes
    primary: int
    kinds: Mapping[int, bytes]
    """Type of each item, such as hvc1 or grid."""
    properties: Mapping[int, list[tuple[bytes, bytes]]]
    """Type and content of each property, in the order in which they apply."""
    references: Mapping[tuple[bytes, int], list[int]]
    """References of each item to other items, by reference type and item id."""
    extents: Mapping[int, list[tuple[int, int, int]]] = field(repr=False)
    """Construction method, offset and size of each piece of an item."""
    inner: bytes = field(repr=False)
    """Content of the box idat."""

    def content(self, item: int) -> bytes:
        """Return the data of an item. Raise ValueError if the file does not contain them."""
        pieces: list[memoryview] = []
        for method, offset, nbytes in self.extents[item]:
            source = memoryview(self.inner if method == _ITEMS else self.data)
            stop = offset + nbytes if nbytes else len(source)
            if method not in {_FILES, _ITEMS} or not offset <= stop <= len(source):
                raise ValueError("an item is outside the file")
            pieces.append(source[offset:stop])
        if sum(map(len, pieces)) > len(self.data):
            raise ValueError("the pieces of an item overlap")
        return b"".join(pieces)

    def property_of(self, item: int, kind: bytes) -> bytes | None:
        """Return the content of the first property of this type, or None if the item has none."""
        return next((content for name, content in self.properties.get(item, ()) if name == kind), None)


def is_heif(data: bytes) -> bool:
    """Return whether `data` begin as a HEIF file. Some AVIF files do, too."""
    return data[4:8] == b"ftyp" and data[8:12] in _IMAGE_BRANDS


def read_items(data: bytes) -> Items | None:
    """Read the items of a HEIF file. Return None if it has no still image.

    Raises:
        ValueError, struct.error, KeyError: The file is broken.

    """
    meta = next((data[start + 4 : stop] for kind, start, stop in boxes(data, 0, len(data)) if kind == b"meta"), None)
    if meta is None:
        return None
    within = {kind: meta[start:stop] for kind, start, stop in boxes(meta, 0, len(meta))}
    if b"pitm" not in within:
        return None
    first = Cursor(within[b"pitm"])
    primary = first.number(2 if not first.number(4) >> 24 else 4)
    return Items(
        data,
        primary,
        dict(_kinds(within[b"iinf"])),
        _properties(within[b"iprp"]),
        dict(_references(within.get(b"iref", bytes(4)))),
        dict(_extents(within[b"iloc"])),
        within.get(b"idat", b""),
    )


def _kinds(iinf: bytes) -> Iterator[tuple[int, bytes]]:
    start = 6 if not iinf[0] else 8
    for kind, begin, end in boxes(iinf, start, len(iinf)):
        entry = Cursor(iinf[begin:end])
        version = entry.number(4) >> 24
        if kind == b"infe" and version >= 2:
            item = entry.number(2 if version == 2 else 4)
            entry.take(2)
            yield item, entry.take(4)


def _properties(iprp: bytes) -> dict[int, list[tuple[bytes, bytes]]]:
    within = [(kind, iprp[start:stop]) for kind, start, stop in boxes(iprp, 0, len(iprp))]
    container = next(content for kind, content in within if kind == b"ipco")
    known = [(kind, container[start:stop]) for kind, start, stop in boxes(container, 0, len(container))]
    properties: dict[int, list[tuple[bytes, bytes]]] = {}
    for table in (Cursor(content) for kind, content in within if kind == b"ipma"):
        head = table.number(4)
        for _ in range(table.number(4)):
            item = table.number(2 if not head >> 24 else 4)
            width = 1 + (head & 1)
            indices = [table.number(width) & (0x7F if width == 1 else 0x7FFF) for _ in range(table.number(1))]
            properties[item] = [known[index - 1] for index in indices if 0 < index <= len(known)]
    return properties


def _references(iref: bytes) -> Iterator[tuple[tuple[bytes, int], list[int]]]:
    width = 2 if not iref[0] else 4
    for kind, start, stop in boxes(iref, 4, len(iref)):
        entry = Cursor(iref[start:stop])
        item = entry.number(width)
        yield (kind, item), [entry.number(width) for _ in range(entry.number(2))]


def _extents(iloc: bytes) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    table = Cursor(iloc)
    version, sizes = table.number(4) >> 24, table.number(2)
    offset_bytes, length_bytes, base_bytes, index_bytes = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    for _ in range(table.number(2 if version < 2 else 4)):
        item = table.number(2 if version < 2 else 4)
        method = table.number(2) & 15 if version else _FILES
        table.take(2)  # index of the file
        base = table.number(base_bytes)
        pieces = []
        for _ in range(table.number(2)):
            table.take(index_bytes if version else 0)
            pieces.append((method, base + table.number(offset_bytes), table.number(length_bytes)))
        yield item, pieces


def pairs_of(content: bytes, count: int) -> tuple[float, ...]:
    """Return `count` fractions of signed 32-bit numbers. Raise ValueError if a denominator is 0."""
    values = struct.unpack_from(f">{2 * count}i", content)
    if not all(values[1::2]):
        raise ValueError("a fraction has the denominator 0")
    return tuple(up / down for up, down in zip(values[::2], values[1::2], strict=True))
