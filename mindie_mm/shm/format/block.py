"""A block: its layout, its header (docs/wire-format.md), and the object with which a writer fills it."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.shm.format.layout import ALIGNMENT, Pieces, round_up
from mindie_mm.shm.format.spec import DTYPE_CODES, DTYPES, MAX_DIMS, ArraySpec, ndarray
from mindie_mm.shm.format.words import Ref, pack_dims

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"MMB1"
MAX_ARRAYS = 64
MAX_NAME_BYTES = 255
MAX_REQUEST_BYTES = 4096
MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
MAX_HEADER_BYTES = 1 << 16

_PREFIX = struct.Struct("<4sII")  # magic, CRC-32 of the rest of the header, header size
_FIXED = struct.Struct("<IIHHHH64s")  # block, generation, array count, request size, digest size, reserved, digest
_ARRAY = struct.Struct("<QBBBB")  # offset, name size, dtype code, number of dimensions, reserved
_DIMS = tuple(struct.Struct(f"<{n}Q") for n in range(MAX_DIMS + 1))
_SMALLEST = _PREFIX.size + _FIXED.size


class DamagedHeaderError(ValueError):
    """Error for bytes that are not a valid block header. Callers replace it with an error from `mindie_mm.errors`."""


class _Buffer(Protocol):
    def __getitem__(self, key: slice, /) -> bytes: ...


class Array(NamedTuple):
    """Shape, dtype and offset of one array in a block."""

    spec: ArraySpec
    offset: int
    """Offset from the start of the block in bytes, a multiple of 64."""


class BlockHeader(NamedTuple):
    """Contents of a block's header.

    Every call to `attach` creates a BlockHeader. The class is a named tuple because creating a dataclass takes three
    times as long.
    """

    block: int
    generation: int
    arrays: Mapping[str, Array]
    """Arrays by name, in the writer's order. The shape word encodes the dtype and shape of the first array."""
    request: str
    """Path of the request's path file. Empty if the block has no path file."""
    digest: bytes | None = None
    """Digest of the arrays and the preprocessing settings, 16 to 64 bytes. None if the item must not be cached."""

    @classmethod
    def unpack(cls, buffer: _Buffer, start: int, stop: int) -> BlockHeader:
        """Read the header of the block at [start, stop) of `buffer`.

        Raises:
            DamagedHeaderError: The bytes are not a valid header, or the arrays do not fit into the block.

        """
        try:
            magic, crc, size = _PREFIX.unpack(buffer[start : start + _PREFIX.size])
            largest = min(MAX_HEADER_BYTES, stop - start)
            if magic != MAGIC or not _SMALLEST <= size <= largest:
                raise DamagedHeaderError(
                    f"the header has magic {magic!r} and size {size}; the magic must be {MAGIC!r}, and the size from "
                    f"{_SMALLEST} to {largest}"
                )
            body = buffer[start + _PREFIX.size : start + size]
            if zlib.crc32(body, size) != crc:
                raise DamagedHeaderError("the checksum of the header is wrong")
            block, generation, num_arrays, request_bytes, digest_bytes, _, digest = _FIXED.unpack_from(body)
            behind = len(body) - request_bytes
            if behind < _FIXED.size or (digest_bytes and not MIN_DIGEST_BYTES <= digest_bytes <= MAX_DIGEST_BYTES):
                raise DamagedHeaderError("the fields of the header exceed its size")
            arrays, end = _unpack_arrays(body[_FIXED.size : behind], num_arrays)
        except (struct.error, IndexError, UnicodeDecodeError, InputError) as error:
            raise DamagedHeaderError(str(error)) from error
        if end > stop - start:
            raise DamagedHeaderError(
                f"the arrays in the header end at byte {end}, but the block has {stop - start} bytes"
            )
        request = os.fsdecode(body[behind:]) if request_bytes else ""
        return cls(block, generation, arrays, request, digest[:digest_bytes] if digest_bytes else None)

    def require(self, block: int, generation: int) -> None:
        """Raise DamagedHeaderError unless the header belongs to this block at this generation."""
        if (self.block, self.generation) != (block, generation):
            raise DamagedHeaderError(f"the header belongs to block {self.block} at generation {self.generation}")


@lru_cache(maxsize=1024)
def _unpack_arrays(described: bytes, num_arrays: int) -> tuple[Mapping[str, Array], int]:
    """Return the arrays and the offset at which the last array ends.

    The result is cached because the same few shapes recur.
    """
    arrays: dict[str, Array] = {}
    at = end = 0
    for _ in range(num_arrays):
        offset, name_bytes, code, num_dims, _ = _ARRAY.unpack_from(described, at)
        at += _ARRAY.size
        shape = _DIMS[num_dims].unpack_from(described, at)
        at += 8 * num_dims
        array = Array(ArraySpec(shape, DTYPES[code]), offset)
        if offset % ALIGNMENT:
            raise DamagedHeaderError(f"an array begins at byte {offset}, which is not a multiple of {ALIGNMENT}")
        arrays[described[at : at + name_bytes].decode()] = array
        at += name_bytes
        end = max(end, offset + array.spec.nbytes)
    if not 1 <= len(arrays) == num_arrays <= MAX_ARRAYS or "" in arrays or at != len(described):
        raise DamagedHeaderError("the descriptions of the arrays do not fill the header")
    return MappingProxyType(arrays), end


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Layout of a block that has not been allocated yet."""

    arrays: Mapping[str, Array]
    described: bytes
    """Descriptions of the arrays in the binary format of the header."""
    size: int
    """Size of the whole block in bytes: header, arrays and padding."""
    header_bytes: int
    first: ArraySpec
    """Spec of the first array, which the shape word encodes."""

    @classmethod
    def of(cls, specs: Mapping[str, ArraySpec], request: bytes) -> BlockPlan:
        """Plan a block with a header, followed by the arrays of `specs`.

        Args:
            specs: Arrays by name, 1 to 64.
            request: Encoded path of the request's path file. Empty if the block has no path file.

        Raises:
            InputError: A name is not a string, or a value is not an ArraySpec.
            LimitExceeded: The path, a name, a shape or the number of arrays exceeds the format's limits.

        """
        if len(request) > MAX_REQUEST_BYTES:
            raise LimitExceeded(
                f"the path of path file {os.fsdecode(request)!r} has more bytes than the limit of {MAX_REQUEST_BYTES}"
            )
        return _plan(tuple(specs.items()), len(request))

    def header(self, block: int, generation: int, request: bytes, digest: bytes) -> bytes:
        """Return the packed header of the block. Pass an empty `digest` if the item must not be cached."""
        fixed = _FIXED.pack(block, generation, len(self.arrays), len(request), len(digest), 0, digest)
        body = fixed + self.described + request
        size = _PREFIX.size + len(body)
        return _PREFIX.pack(MAGIC, zlib.crc32(body, size), size) + body


@lru_cache(maxsize=1024)
def _plan(specs: tuple[tuple[str, ArraySpec], ...], request_bytes: int) -> BlockPlan:
    if not 1 <= len(specs) <= MAX_ARRAYS:
        raise LimitExceeded(f"the block has {len(specs)} arrays; it must have 1 to {MAX_ARRAYS}")
    for name, spec in specs:
        if type(name) is not str or not isinstance(spec, ArraySpec):
            raise InputError(
                f"array {name!r} is described by {type(spec).__name__}; an array must have a string as its name and "
                "an ArraySpec as its description"
            )
    names = [name.encode() for name, _ in specs]
    for encoded in names:
        if not 1 <= len(encoded) <= MAX_NAME_BYTES:
            shown = encoded[:40].decode(errors="replace")
            raise LimitExceeded(f"array name {shown!r} has {len(encoded)} bytes; it must have 1 to {MAX_NAME_BYTES}")
    described = sum(_ARRAY.size + 8 * len(spec.shape) for _, spec in specs) + sum(map(len, names))
    header_bytes = _SMALLEST + described + request_bytes
    at = round_up(header_bytes, ALIGNMENT)
    pack_dims(specs[0][1].shape)  # raises LimitExceeded if the shape does not fit a shape word
    arrays: dict[str, Array] = {}
    parts: list[bytes] = []
    for encoded, (text, spec) in zip(names, specs, strict=True):
        arrays[text] = Array(spec, at)
        parts += (
            _ARRAY.pack(at, len(encoded), DTYPE_CODES[spec.dtype], len(spec.shape), 0),
            _DIMS[len(spec.shape)].pack(*spec.shape),
            encoded,
        )
        at = round_up(at + spec.nbytes, ALIGNMENT)
    return BlockPlan(MappingProxyType(arrays), b"".join(parts), at, header_bytes, specs[0][1])


Buffer = mmap.mmap | memoryview


class Store(Protocol):
    """Container of blocks: an `Arena`."""

    number: int
    """Arena number in references to the blocks, 0 to 65,535."""

    def publish(self, block: Block, digest: bytes) -> None:
        """Make a filled block readable. Caches use `digest`, unless it is empty, as the key of the block's contents."""

    def free(self, block: Block) -> None:
        """Free a block that was not published."""


class Block(Mapping[str, "np.ndarray[Any, Any]"]):
    """Arrays by name, which the writer fills and then publishes. A block is a context manager.

    A block that is not published is freed when the context exits, or when the block is garbage-collected. Do not write
    to the arrays after `publish`, and do not use them after the context has exited.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_buffer",
        "_published",
        "_store",
        "entry",
        "generation",
        "nbytes",
        "pieces",
        "plan",
        "request",
    )

    def __init__(
        self,
        store: Store,
        plan: BlockPlan,
        request: bytes,
        entry: int,
        generation: int,
        pieces: Pieces,
        nbytes: int,
        buffer: Buffer,
        base: int,
    ) -> None:
        """Create the object for a block that a store has allocated. Callers use the store's `allocate` instead."""
        self.plan = plan
        self.request = request
        """Encoded path of the request's path file. Empty if the block has no path file."""
        self.entry = entry
        self.generation = generation
        self.pieces = pieces
        """Location of the block in the store's file."""
        self.nbytes = nbytes
        """Size of the block in the store's file, in bytes."""
        self._store = store
        self._buffer, self._base = buffer, base
        self._published = False

    @property
    def ref(self) -> Ref:
        """Reference to the block. Other processes can attach the block after `publish`."""
        first = self.plan.first
        return Ref(self._store.number, self.entry, self.generation, first.dtype, first.shape)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        spec, offset = self.plan.arrays[name]
        array: np.ndarray[Any, Any] = ndarray()(spec.shape, spec.dtype, self._buffer, self._base + offset)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.arrays)

    def __len__(self) -> int:
        return len(self.plan.arrays)

    def write_header(self, digest: bytes) -> None:
        """Write the block's header on behalf of the store. Pass an empty `digest` if the item must not be cached."""
        header = self.plan.header(self.entry, self.generation, self.request, digest)
        self._buffer[self._base : self._base + len(header)] = header

    def publish(self, digest: bytes | None = None) -> Ref:
        """Make the block readable for other processes, without reading its arrays. Idempotent.

        Args:
            digest: Digest of all arrays and the preprocessing settings, 16 to 64 bytes. Without a digest, the item is
                never cached.

        Returns:
            The reference to the block.

        Raises:
            LimitExceeded: The digest is too short or too long.
            StaleReference: The block was freed while it was being filled, for example because its request has ended.
            SharedMemoryError: The store is closed or lost, or the block is no longer being filled.

        """
        if self._published:
            return self.ref
        if digest is not None and not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
            raise LimitExceeded(
                f"the digest has {len(digest)} bytes; it must have {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES}"
            )
        self._store.publish(self, digest or b"")
        self._published = True
        return self.ref

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._published:
            self._store.free(self)
