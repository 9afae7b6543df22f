"""The header with which a block describes itself (docs/wire-format.md)."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.shm.layout import ALIGNMENT, round_up
from mindie_mm.shm.spec import DTYPE_CODES, DTYPES, MAX_DIMS, ArraySpec

MAGIC = b"MMB1"
MAX_ARRAYS = 64
MAX_NAME_BYTES = 255
MAX_REQUEST_BYTES = 4096
MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
MAX_HEADER_BYTES = 1 << 16

_PREFIX = struct.Struct("<4sII")  # magic, CRC-32 of what follows it, bytes of the header
_FIXED = struct.Struct("<IIHHHH64s")  # block, generation, arrays, bytes of request, of digest, reserved, digest
_ARRAY = struct.Struct("<QBBBB")  # offset, bytes of the name, dtype code, dimensions, reserved
_DIMS = tuple(struct.Struct(f"<{n}Q") for n in range(MAX_DIMS + 1))
_SMALLEST = _PREFIX.size + _FIXED.size


class DamagedHeaderError(ValueError):
    """Bytes that are no block header; whoever reads them knows which error of the tree that is."""


class _Buffer(Protocol):
    def __getitem__(self, key: slice, /) -> bytes: ...


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], code: int) -> ArraySpec:
    """Readers meet the same few over and over."""
    return ArraySpec(shape, DTYPES[code])


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a block."""

    spec: ArraySpec
    offset: int
    """Bytes from the start of the block, a multiple of 64."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block says of itself."""

    block: int
    generation: int
    arrays: Mapping[str, Array]
    """In the order of allocation; the first one's dtype and shape stand in the shape word."""
    request: str
    """Path of the request's path file, empty if it has none."""
    digest: bytes | None = None
    """Of the content and its preprocessing; None while the block is filled, or if the item is not to be cached."""

    def pack(self) -> bytes:
        request = os.fsencode(self.request)
        digest = self.digest or b""
        parts = [_FIXED.pack(self.block, self.generation, len(self.arrays), len(request), len(digest), 0, digest)]
        for name, array in self.arrays.items():
            encoded, shape = name.encode(), array.spec.shape
            parts.append(_ARRAY.pack(array.offset, len(encoded), DTYPE_CODES[array.spec.dtype], len(shape), 0))
            parts.append(_DIMS[len(shape)].pack(*shape))
            parts.append(encoded)
        parts.append(request)
        body = b"".join(parts)
        size = _PREFIX.size + len(body)
        return _PREFIX.pack(MAGIC, zlib.crc32(body, size), size) + body

    @classmethod
    def unpack(cls, buffer: _Buffer, start: int, stop: int) -> BlockHeader:
        """Reads the header of the block at [start, stop) of a buffer. DamagedHeaderError."""
        try:
            magic, crc, size = _PREFIX.unpack(buffer[start : start + _PREFIX.size])
            if magic != MAGIC or not _SMALLEST <= size <= min(MAX_HEADER_BYTES, stop - start):
                raise DamagedHeaderError(f"magic {magic!r} or size {size} is wrong")
            body = buffer[start + _PREFIX.size : start + size]
            if zlib.crc32(body, size) != crc:
                raise DamagedHeaderError("its check does not hold")
            return cls._unpack_body(body, stop - start)
        except (struct.error, IndexError, UnicodeDecodeError, InputError) as error:
            raise DamagedHeaderError(str(error)) from error

    def require(self, block: int, generation: int) -> None:
        """DamagedHeaderError unless it is this block's header, at this generation."""
        if (self.block, self.generation) != (block, generation):
            raise DamagedHeaderError(f"it is block {self.block}'s at generation {self.generation}")

    @classmethod
    def _unpack_body(cls, body: bytes, block_bytes: int) -> BlockHeader:
        block, generation, num_arrays, request_bytes, digest_bytes, _, digest = _FIXED.unpack_from(body)
        at = _FIXED.size
        arrays = {}
        for _ in range(num_arrays):
            offset, name_bytes, code, num_dims, _ = _ARRAY.unpack_from(body, at)
            at += _ARRAY.size
            shape = _DIMS[num_dims].unpack_from(body, at)
            at += 8 * num_dims
            array = Array(_spec(shape, code), offset)
            if offset % ALIGNMENT or offset + array.spec.nbytes > block_bytes:
                raise DamagedHeaderError(f"an array at {offset} does not lie in the block")
            arrays[body[at : at + name_bytes].decode()] = array
            at += name_bytes
        if not arrays or at + request_bytes != len(body) or digest_bytes > MAX_DIGEST_BYTES:
            raise DamagedHeaderError("its fields overrun it")
        return cls(block, generation, arrays, os.fsdecode(body[at:]), digest[:digest_bytes] if digest_bytes else None)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Where the arrays of a block lie, known before the block has a place."""

    arrays: Mapping[str, Array]
    request: str
    size: int
    """Bytes of the whole block: header, arrays, alignment."""

    @classmethod
    def of(cls, specs: Mapping[str, ArraySpec], request: str) -> BlockPlan:
        """Lays out `specs`. InputError, LimitExceeded."""
        if not 1 <= len(specs) <= MAX_ARRAYS:
            raise LimitExceeded(f"a block of {len(specs)} arrays; 1 to {MAX_ARRAYS} are allowed")
        if len(os.fsencode(request)) > MAX_REQUEST_BYTES:
            raise LimitExceeded(f"path file {request!r} has more than {MAX_REQUEST_BYTES} bytes")
        header = _SMALLEST + len(os.fsencode(request))
        for name, spec in specs.items():
            name_bytes = len(name.encode())
            if not 1 <= name_bytes <= MAX_NAME_BYTES:
                raise LimitExceeded(f"array name {name!r} has {name_bytes} bytes; 1 to {MAX_NAME_BYTES} are allowed")
            header += _ARRAY.size + 8 * len(spec.shape) + name_bytes
        at = round_up(header, ALIGNMENT)
        arrays = {}
        for name, spec in specs.items():
            arrays[name] = Array(spec, at)
            at = round_up(at + spec.nbytes, ALIGNMENT)
        return cls(arrays, request, at)


def check_digest(digest: bytes) -> None:
    """LimitExceeded unless the digest has 16 to 64 bytes."""
    if not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
        raise LimitExceeded(f"a digest of {len(digest)} bytes; {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} are allowed")
