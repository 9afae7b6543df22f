"""Digests of media items. If two items have equal digests, their sources, settings and arrays are equal."""

from __future__ import annotations

import os

import numpy as np

from mindie_mm.decode.parcel import Parcel, Part
from mindie_mm.errors import MediaError
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.salt import salted

DIGEST_BYTES = 32
_PIECE_BYTES = 2**20


def content_digest(settings: str, data: Data, salt: str = "") -> bytes:
    """Return the digest of a source whose data are in memory.

    Args:
        settings: `Plan.settings`.
        data: Data of the source.
        salt: Salt of the digest. Equal contents have different digests if the salts are different.

    Returns:
        A digest of 32 bytes.

    """
    digest = salted(salt)
    digest.update(settings.encode())
    assert not isinstance(data, DocumentPage), "a page has the digest of its document, with settings of its own"
    if isinstance(data, tuple):
        digest.update(_list_head(len(data)))
        for frame in data:
            digest.update(content_digest("", frame))
    elif isinstance(data, np.ndarray):
        digest.update(_array_head(str(data.dtype), data.shape))
        digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    else:
        digest.update(_BYTES_HEAD)
        digest.update(data)
    return digest.digest(DIGEST_BYTES)


def parcel_digest(settings: str, parcel: Parcel, salt: str = "") -> bytes:
    """Return the digest of a source in an open file. The result equals the `content_digest` of the same source.

    Raises:
        MediaError: The file was truncated after it was packed.

    """
    if not parcel.is_list:
        return _part_digest(settings, parcel.descriptor, parcel.parts[0], 0, salt)
    digest = salted(salt)
    digest.update(settings.encode())
    digest.update(_list_head(len(parcel.parts)))
    offset = 0
    for part in parcel.parts:
        digest.update(_part_digest("", parcel.descriptor, part, offset, ""))
        offset += part.nbytes
    return digest.digest(DIGEST_BYTES)


def _part_digest(settings: str, descriptor: int, part: Part, offset: int, salt: str) -> bytes:
    digest = salted(salt)
    digest.update(settings.encode())
    digest.update(_array_head(part.dtype, part.shape) if part.dtype else _BYTES_HEAD)
    stop = offset + part.nbytes
    while offset < stop:
        piece = os.pread(descriptor, min(_PIECE_BYTES, stop - offset), offset)
        if not piece:
            raise MediaError("the file was truncated while it was being read")
        digest.update(piece)
        offset += len(piece)
    return digest.digest(DIGEST_BYTES)


_BYTES_HEAD = b"\0bytes\0"


def _list_head(number: int) -> bytes:
    return f"\0frames {number}\0".encode()


def _array_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"\0array {dtype} {shape}\0".encode()
