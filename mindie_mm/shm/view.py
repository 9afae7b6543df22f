"""Functions to attach, verify and free published blocks. Any process can call them without a shared lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from mindie_mm.errors import InputError, SegmentMissing, StaleReference
from mindie_mm.shm.format.layout import fence
from mindie_mm.shm.format.spec import ndarray
from mindie_mm.shm.format.words import Ref
from mindie_mm.shm.mapped import MappedArena, mapped_arena

if TYPE_CHECKING:
    from mmap import mmap

    import numpy as np


class View(Mapping[str, "np.ndarray[Any, Any]"]):
    """Read-only arrays of a published block, by name. Creating a view copies no data.

    The arrays share the arena's pages and keep its mapping alive. After you have copied the data, call `verify` or
    exit the view as a context manager. Without this check, the copy may contain data of another block that reused the
    pages. A closed view raises StaleReference.
    """

    __slots__ = ("_arena", "_base", "_buffer", "_header", "digest", "ref")

    def __init__(self, arena: MappedArena, ref: Ref) -> None:
        """Locate a block. Callers use `attach` instead."""
        self._buffer: mmap | memoryview[int] | None
        self._buffer, self._base, header = arena.block(ref)
        self.ref = ref
        """Reference to the block."""
        self.digest = header.digest
        """Digest of the arrays and the preprocessing settings. None if the item must not be cached."""
        self._arena: MappedArena | None = arena
        self._header = header

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        spec, offset = self._header.arrays[name]
        self._require_open()  # without a buffer, numpy would return memory with arbitrary contents
        array: np.ndarray[Any, Any] = ndarray()(spec.shape, spec.dtype, self._buffer, self._base + offset)
        return array

    @property
    def arena(self) -> MappedArena:
        """Arena that contains the block."""
        return self._require_open()

    def file_offset(self, name: str) -> tuple[MappedArena, int] | None:
        """Return the arena, and the array's offset in the arena's file. Return None if the block has several pieces."""
        if self._buffer is not self.arena.map:
            return None
        return self.arena, self._base + self._header.arrays[name].offset

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.arrays)

    def __len__(self) -> int:
        return len(self._header.arrays)

    @property
    def nbytes(self) -> int:
        """Total size of the arrays in bytes."""
        return sum(spec.nbytes for spec, _ in self._header.arrays.values())

    def verify(self) -> None:
        """Raise StaleReference if the block has been freed since it was attached."""
        fence()
        self.arena.check(self.ref)

    def close(self) -> None:
        """Stop keeping the mapping alive. Arrays of this view that are still in use keep it alive."""
        self._arena = self._buffer = None

    def _require_open(self) -> MappedArena:
        if self._arena is None:
            raise StaleReference(f"{self.ref}: the block was read before and may have been freed")
        return self._arena

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.verify()


def attach(ref: Ref) -> View:
    """Return the arrays of a published block without copying them.

    Raises:
        InputError: `ref` is not a Ref.
        StaleReference: The block was freed.
        SegmentMissing: The arena was removed, truncated or replaced, or is damaged.
        CorruptReference: The dtype or shape in the reference differs from that of the block's first array.
        SharedMemoryError: The arena cannot be mapped.

    """
    _require_ref(ref)
    try:
        arena = mapped_arena(ref.arena)
    except SegmentMissing as error:
        raise SegmentMissing(f"{ref}: {error}") from error
    view = View(arena, ref)
    arena.populate()
    return view


def free_block(ref: Ref) -> bool:
    """Free a block. Return whether this call freed it. Raise SharedMemoryError if the arena cannot be mapped."""
    try:
        return mapped_arena(ref.arena).free(ref)
    except SegmentMissing:
        return False


def free(ref: Ref) -> None:
    """Free a block. Any process may call this function.

    The call is idempotent: it does nothing if the arena is gone or the block has been freed before.

    Raises:
        InputError: `ref` is not a Ref.
        SharedMemoryError: The arena cannot be mapped.

    """
    _require_ref(ref)
    free_block(ref)


def _require_ref(ref: Ref) -> None:
    if not isinstance(ref, Ref):
        raise InputError(f"ref is of type {type(ref).__name__}; it must be a Ref, such as those of Prompt.refs()")
