"""Font files of the system, which replace fonts that a PDF does not embed.

All files are mapped into memory when they are found, because a decoder cannot open files. Mappings take memory only for
the pages that are read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts")
"""Folders with fonts, as in the default configuration of fontconfig."""
MAX_FILES = 1024
_ENDINGS = (".ttf", ".ttc", ".otf", ".otc")
_STYLES = ("bold", "black", "heavy", "thin", "light", "italic", "oblique", "mono")
_COLLECTION = b"ttcf"
_MAX_FACES = 64
_FAILED = ctypes.c_void_p(-1).value
_CMAPS: Mapping[tuple[int, int], int] = {(3, 10): 0, (0, 4): 1, (0, 6): 1, (3, 1): 2, (0, 3): 3}
"""Platform and encoding of the cmap subtables that map Unicode, with their rank. Lower ranks are preferred."""
_FAMILY_NAMES = frozenset({1, 4, 6, 16})


@dataclass(frozen=True, slots=True, eq=False)
class Face:
    """A face of a font file."""

    address: int
    """Address of the file in memory."""
    nbytes: int
    """Size of the file."""
    offset: int
    """Offset of the face's table directory in the file. 0 unless the file is a collection."""
    names: frozenset[str]
    """Family, full and PostScript names, as in `normalized`."""
    starts: NDArray[np.int64]
    """First character of each range of characters, sorted."""
    stops: NDArray[np.int64]
    """Character after each range."""

    def num_of(self, characters: Collection[str]) -> int:
        """Return how many of `characters` the face has."""
        codes = np.fromiter(map(ord, characters), np.int64, len(characters))
        ranges = np.searchsorted(self.starts, codes, "right") - 1
        return int(((ranges >= 0) & (codes < self.stops[ranges])).sum())


def normalized(name: str) -> str:
    """Return the name of a font in lower case, without spaces and punctuation."""
    return "".join(filter(str.isalnum, name)).lower()


def find_faces(folders: Sequence[str | Path] = FOLDERS) -> list[Face]:
    """Map the font files in `folders`, and return their faces, upright faces of normal weight first.

    Files that cannot be read are left out.
    """
    files = [path for folder in folders for path in _files(os.path.expanduser(folder))]  # noqa: PTH111 - may lack a home
    faces = [face for path in files[:MAX_FILES] for face in _faces(path)]
    return sorted(faces, key=lambda face: any(style in name for style in _STYLES for name in face.names))


def _files(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (f"{parent}/{name}" for name in sorted(names) if name.lower().endswith(_ENDINGS))


def _faces(path: str) -> list[Face]:
    try:
        address, nbytes = _mapped(path)
        data = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        offsets: Sequence[int] = (0,)
        if data[:4] == _COLLECTION:
            (count,) = struct.unpack_from(">L", data, 8)
            offsets = struct.unpack_from(f">{min(count, _MAX_FACES)}L", data, 12)
        return [Face(address, nbytes, offset, *_tables(data, offset)) for offset in offsets]
    except (OSError, ValueError, KeyError, struct.error):
        return []


def _mapped(path: str) -> tuple[int, int]:
    """Map a file. Return its address and size. Python's mmap would keep a descriptor open."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(descriptor).st_size
        address = _libc().mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return address, nbytes


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    return libc


def _tables(data: memoryview, offset: int) -> tuple[frozenset[str], NDArray[np.int64], NDArray[np.int64]]:
    """Return the names and the ranges of characters of a face (OpenType 1.9, `name` and `cmap`)."""
    (count,) = struct.unpack_from(">H", data, offset + 4)
    records = (struct.unpack_from(">4s4xLL", data, offset + 12 + 16 * index) for index in range(count))
    tables = {tag: data[start : start + nbytes] for tag, start, nbytes in records}
    starts, stops = _ranges(tables[b"cmap"])
    if not len(starts):
        raise ValueError("the face has no characters")
    order = np.argsort(starts, kind="stable")
    return frozenset(_names(tables[b"name"])), starts[order], stops[order]


def _names(table: memoryview) -> Iterator[str]:
    _, count, base = struct.unpack_from(">HHH", table)
    for index in range(count):
        platform, _, _, name, nbytes, start = struct.unpack_from(">6H", table, 6 + 12 * index)
        if name in _FAMILY_NAMES:
            text = bytes(table[base + start : base + start + nbytes])
            yield normalized(text.decode("latin-1" if platform == 1 else "utf-16-be", "replace"))


def _ranges(table: memoryview) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and stops of the ranges of characters in a `cmap` table, from its best Unicode subtable.

    Raise ValueError if it has no such subtable.
    """
    (count,) = struct.unpack_from(">H", table, 2)
    records = [struct.unpack_from(">HHL", table, 4 + 8 * index) for index in range(count)]
    known = [(_CMAPS[record[:2]], record[2]) for record in records if record[:2] in _CMAPS]
    start = min(known)[1]
    (form,) = struct.unpack_from(">H", table, start)
    if form == 12:
        (num_groups,) = struct.unpack_from(">L", table, start + 12)
        groups = np.frombuffer(table, ">u4", 3 * num_groups, start + 16).reshape(-1, 3).astype(np.int64)
        return groups[:, 0], groups[:, 1] + 1
    if form == 4:
        (twice,) = struct.unpack_from(">H", table, start + 6)
        ends = np.frombuffer(table, ">u2", twice // 2, start + 14).astype(np.int64)
        starts = np.frombuffer(table, ">u2", twice // 2, start + 16 + twice).astype(np.int64)
        return starts[:-1], ends[:-1] + 1  # the last segment is a mark of the end
    raise ValueError(f"the cmap has format {form}")
