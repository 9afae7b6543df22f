"""Media sources as open files that can be sent to another process."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from math import prod
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.inputs import Kind, Media
from mindie_mm.media.guard.caps import decodes_to_count
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.source import read_source, source_path
from mindie_mm.settings.config import MAX_SOURCE_BYTES, MediaCaps

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals of a copied source. A compromised decoder cannot change the copy before the tokenizer computes its digest."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Range of bytes in a parcel's file, with encoded media or with an array of pixels or samples."""

    nbytes: int
    """Length of the range in bytes."""
    dtype: str = ""
    """Name of the array's numpy dtype. Empty for encoded bytes."""
    shape: tuple[int, ...] = ()


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """Media item whose source is an open file, as a decoder receives it."""

    media: Media
    """The item, without its source."""
    counts: Mapping[Kind, int]
    """Number of items of each kind in the prompt."""
    descriptor: int
    """Descriptor of the open file in the process that packed the parcel, which closes it. The decoder gets another one
    with the message."""
    parts: tuple[Part, ...]
    """Contiguous ranges of the file, from its start."""
    is_list: bool = False
    """True if the parts are the frames of a video. If False, the parcel has a single part."""
    decodes_to_count: bool = False
    """True to count the frames of a video by decoding them, False to count packets."""

    @property
    def nbytes(self) -> int:
        """Size of the source in bytes."""
        return sum(part.nbytes for part in self.parts)

    def limit_s(self, caps: MediaCaps) -> float:
        """Return the maximum processor time for planning the item, and again for writing it, in seconds."""
        return caps.max_decode_s if self.media.page is None else caps.max_pdf_page_s


def pack_file(media: Media, counts: Mapping[Kind, int]) -> Parcel | None:
    """Open the file of `media`.

    Returns:
        A parcel, or None if the source is not a readable regular file of 1 to `MAX_SOURCE_BYTES` bytes.

    """
    if not isinstance(media.source, str) or (path := source_path(media)) is None:
        return None
    try:
        if not path.is_file():  # do not open a FIFO, because that would unblock its writer
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None  # `pack_copy` raises the error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MAX_SOURCE_BYTES:
        os.close(descriptor)
        return None
    return _parcel(media, counts, descriptor, (Part(status.st_size),))


def pack_copy(media: Media, counts: Mapping[Kind, int]) -> Parcel:
    """Read the source of `media` and copy it to a sealed memfd.

    Raises:
        InputError, MediaError, LimitExceeded: In the same cases as `read_source`.

    """
    data = read_source(media)
    pieces = data if isinstance(data, tuple) else (data,)
    parts: list[Part] = []
    buffers: list[memoryview] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            parts.append(Part(len(piece)))
            buffers.append(memoryview(piece))
        else:
            array = np.ascontiguousarray(piece)
            parts.append(Part(array.nbytes, str(array.dtype), array.shape))
            buffers.append(array.reshape(-1).view(np.uint8).data)
    descriptor = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(buffers)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return _parcel(media, counts, descriptor, tuple(parts), is_list=isinstance(data, tuple))


def _parcel(
    media: Media, counts: Mapping[Kind, int], descriptor: int, parts: tuple[Part, ...], *, is_list: bool = False
) -> Parcel:
    return Parcel(
        msgspec.structs.replace(media, source=None), {**counts}, descriptor, parts, is_list, decodes_to_count()
    )


def unpacked(parcel: Parcel, descriptor: int) -> Data:
    """Return the source in a parcel, as `read_source` returns it.

    Args:
        parcel: The parcel.
        descriptor: Descriptor of the parcel's file in this process.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has fewer bytes than the parts.

    """
    offset = 0
    values: list[bytes | NDArray[Any]] = []
    for part in parcel.parts:
        values.append(_read(descriptor, part, offset))
        offset += part.nbytes
    return cast("Data", tuple(values) if parcel.is_list else values[0])


def _read(descriptor: int, part: Part, offset: int) -> bytes | NDArray[Any]:
    data = os.pread(descriptor, part.nbytes, offset)
    while len(data) < part.nbytes:  # each call reads at most 2 GiB
        further = os.pread(descriptor, part.nbytes - len(data), offset + len(data))
        if not further:
            raise ValueError(f"the file ends at byte {offset + len(data)}, inside a part of {part.nbytes} bytes")
        data += further
    if not part.dtype:
        return data
    array = np.frombuffer(data, part.dtype, prod(part.shape))
    return array.reshape(part.shape)
