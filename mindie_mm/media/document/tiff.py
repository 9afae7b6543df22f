"""Choice of the image in a TIFF, which may also contain pages, thumbnails and masks.

A TIFF is a chain of directories, each with an image. Pillow decodes the first directory, whatever it is. TIFF 6.0 and
TIFF Technical Note 1 (SubIFDs) define the tags.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.inputs.files import TIFF_STARTS

MAX_ENTRIES = 100_000
"""Maximum number of entries in all directories of a TIFF."""
_NEW_SUBFILE, _SUBFILE, _WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SUB_DIRECTORIES = 254, 255, 256, 257, 258, 262, 330
DEPTH = 32997
"""Tag ImageDepth: number of slices in one directory. libtiff and Pillow read only one slice."""
_TAGS = frozenset({_NEW_SUBFILE, _SUBFILE, _WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SUB_DIRECTORIES, DEPTH})
_REDUCED, _MASK = 1, 4  # bits of NewSubfileType
_OLD_REDUCED = 2  # value of SubfileType
_WHITE_IS_ZERO, _BLACK_IS_ZERO = 0, 1
_RAW = frozenset({32803, 34892})  # color filter array, and linear raw (DNG)
_FORMATS: Mapping[int, str] = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q", 18: "Q"}
"""Formats of unsigned integers and offsets in `struct`, by TIFF type."""
_MAX_VALUES = 64
"""Maximum number of values that are read from an entry."""
_CANON_RAW = b"II*\0\x10\0\0\0CR\2\0"


@dataclass(frozen=True, slots=True)
class _Directory:
    offset: int
    values: Mapping[int, tuple[int, ...]]
    """Values of the tags in `_TAGS`."""
    places: Mapping[int, tuple[int, str]]
    """For each tag, the offset of its first value and the format of the value."""

    def first(self, tag: int, default: int) -> int:
        return next(iter(self.values.get(tag, ())), default)

    @property
    def is_image(self) -> bool:
        return self.first(_WIDTH, 0) > 0 and self.first(_HEIGHT, 0) > 0 and not self.first(_NEW_SUBFILE, 0) & _MASK

    @property
    def is_reduced(self) -> bool:
        return bool(self.first(_NEW_SUBFILE, 0) & _REDUCED) or self.first(_SUBFILE, 1) == _OLD_REDUCED

    @property
    def num_pixels(self) -> int:
        return self.first(_WIDTH, 0) * self.first(_HEIGHT, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TiffImage:
    """An image of a TIFF, as a TIFF that begins with this image."""

    data: bytes
    is_negative: bool
    """True if 0 is white, although `data` say that 0 is black. Pillow reads few such files with more than 8 bits, and
    does not invert their samples."""


@dataclass(frozen=True, slots=True, eq=False)
class TiffPage:
    """A page of a TIFF. It has the attributes of a PdfPage that belong to the document."""

    data: bytes
    index: int
    """Index of the page. The first page has index 0."""
    num_pages: int

    @classmethod
    def open(cls, data: bytes, index: int) -> TiffPage:
        """Find a page. Raise MediaError if the TIFF has no readable directory."""
        num_pages = len(_Tiff(data).pages())
        if index >= num_pages:
            raise MediaError(f"the TIFF of {len(data)} bytes cannot be read; it may be truncated or damaged")
        return cls(data, index, num_pages)

    @property
    def settings(self) -> str:
        """Index of the page, as a string. Together with `data`, it determines the pixels."""
        return f"page {self.index} of a TIFF"

    def image(self) -> TiffImage:
        """Return the image of this page. Raise MediaError in the same cases as `image_of_tiff`."""
        tiff = _Tiff(self.data)
        return tiff.starting_with(tiff.pages()[self.index])


def is_tiff(data: bytes) -> bool:
    """Return whether `data` begin as a TIFF."""
    return data.startswith(TIFF_STARTS)


def image_of_tiff(data: bytes) -> TiffImage:
    """Return the only image of a TIFF. Thumbnails, other reduced images and masks do not count.

    Raises:
        MediaError: The TIFF has several pages or slices, or is the raw file of a camera.
        LimitExceeded: The directories have too many entries.

    """
    tiff = _Tiff(data)
    pages = tiff.pages()
    if len(pages) > 1:
        raise MediaError(
            f"the TIFF has {len(pages)} pages, but an image item is one image; send the TIFF as a document (in a chat, "
            f"as a part of type file) to use all pages, or send each page as an image"
        )
    return tiff.starting_with(pages[0]) if pages else TiffImage(data, is_negative=False)


class _Tiff:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._order = "<" if data.startswith(b"II") else ">"
        self._is_big = b"+" in data[2:4]
        self._offset = "Q" if self._is_big else "L"
        self._head = 8 if self._is_big else 4
        """Offset of the offset of the first directory."""
        self._num_entries = 0

    def pages(self) -> list[_Directory]:
        """Return the directories of the pages.

        If all images of the chain are reduced, as in the raw files of cameras, these are the full images in
        subdirectories. If there is no full image at all, it is the largest image.
        """
        images = [directory for directory in self._chain if directory.is_image]
        full = [directory for directory in images if not directory.is_reduced]
        if not full:
            below = [self._directory(offset) for one in images for offset in one.values.get(_SUB_DIRECTORIES, ())]
            inner = [directory for directory, _ in filter(None, below) if directory.is_image]
            full = [directory for directory in inner if not directory.is_reduced]
            full = full or sorted(images + inner, key=lambda one: one.num_pixels)[-1:]
        return full

    def starting_with(self, directory: _Directory) -> TiffImage:
        """Return a TIFF that begins with `directory`. Raise MediaError if it has slices, or raw data of a camera."""
        kind = directory.first(_PHOTOMETRIC, _BLACK_IS_ZERO)
        if kind in _RAW or self._data.startswith(_CANON_RAW):
            raise MediaError("the file has the raw data of a camera; convert it to JPEG, PNG or TIFF")
        if (depth := directory.first(DEPTH, 1)) > 1:
            raise MediaError(
                f"an image of the TIFF has {depth} slices (ImageDepth), of which only one would be read; send each "
                "slice as an image, or as a page of a TIFF with several pages"
            )
        is_negative = kind == _WHITE_IS_ZERO and directory.first(_BITS, 1) > 8
        is_first = directory.offset == self._unpack(self._offset, self._head)
        if is_first and not is_negative:
            return TiffImage(self._data, is_negative)
        data = bytearray(self._data)
        struct.pack_into(self._order + self._offset, data, self._head, directory.offset)
        if is_negative:
            place, code = directory.places[_PHOTOMETRIC]
            struct.pack_into(self._order + code, data, place, _BLACK_IS_ZERO)
        return TiffImage(bytes(data), is_negative)

    @cached_property
    def _chain(self) -> list[_Directory]:
        """Directories in the order of the file. A broken or repeated directory ends the chain."""
        return list(self._directories())

    def _directories(self) -> Iterator[_Directory]:
        seen = {0}
        try:
            place = self._unpack(self._offset, self._head)
        except struct.error:
            return
        while place not in seen and (found := self._directory(place)) is not None:
            seen.add(place)
            directory, place = found
            yield directory

    def _directory(self, place: int) -> tuple[_Directory, int] | None:
        """Return the directory at `place` and the offset of the next one, or None if the directory is broken."""
        start, entry = place, "HHQ8x" if self._is_big else "HHL4x"
        try:
            count = self._unpack("Q" if self._is_big else "H", place)
            place += 8 if self._is_big else 2
            nbytes = count * struct.calcsize(self._order + entry)
            if place + nbytes > len(self._data):
                return None
            self._count(count)
            values, places = {}, {}
            stepped = struct.iter_unpack(self._order + entry, self._data[place : place + nbytes])
            for index, (tag, kind, num) in enumerate(stepped):
                if tag in _TAGS and kind in _FORMATS:
                    field = place + (index + 1) * (nbytes // count) - self._width
                    values[tag], places[tag] = self._values(field, _FORMATS[kind], min(num, _MAX_VALUES))
            following = (
                self._unpack(self._offset, place + nbytes) if place + nbytes + self._width <= len(self._data) else 0
            )
        except struct.error:
            return None
        return _Directory(start, values, places), following

    def _values(self, field: int, code: str, num: int) -> tuple[tuple[int, ...], tuple[int, str]]:
        """Return the values of an entry and the place of the first value. `field` is the offset of its value field."""
        form = f"{self._order}{num}{code}"
        place = field if struct.calcsize(form) <= self._width else self._unpack(self._offset, field)
        if place > len(self._data):
            raise struct.error
        return struct.unpack_from(form, self._data, place), (place, code)

    def _count(self, num_entries: int) -> None:
        self._num_entries += num_entries
        if self._num_entries > MAX_ENTRIES:
            raise LimitExceeded(
                f"the TIFF's directories have {self._num_entries} or more entries; the limit is {MAX_ENTRIES}"
            )

    @property
    def _width(self) -> int:
        return 8 if self._is_big else 4

    def _unpack(self, code: str, place: int) -> int:
        if place > len(self._data):  # beyond 2**63, `struct` would raise another error
            raise struct.error
        (value,) = struct.unpack_from(self._order + code, self._data, place)
        assert isinstance(value, int)
        return value
