"""Functions to attach, verify and free published blocks. Any process can call them without a shared lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self
from weakref import ref as weak_reference

from mindie_mm.errors import InputError, SegmentMissing
from mindie_mm.shm.format.layout import fence
from mindie_mm.shm.format.spec import ndarray
from mindie_mm.shm.format.words import Ref
from mindie_mm.shm.mapped import MappedArena, mapped_arena

if TYPE_CHECKING:
    import numpy as np


class View(Mapping[str, "np.ndarray[Any, Any]"]):
    """Read-only arrays of a published block, by name. Creating a view copies no data.

    The arrays share the arena's pages and keep its mapping alive. After you have copied the data, call `verify` or
    exit the view as a context manager. Without this check, the copy may contain data of another block that reused the
    pages.
    """

    __slots__ = ("_base", "_buffer", "_header", "arena", "digest", "ref")

    def __init__(self, arena: MappedArena, ref: Ref) -> None:
        """Locate a block. Callers use `attach` instead."""
        self._buffer, self._base, header = arena.block(ref)
        self.ref = ref
        """Reference to the block."""
        self.digest = header.digest
        """Digest of the arrays and the preprocessing settings. None if the item must not be cached."""
        self.arena = arena
        """Arena that contains the block."""
        self._header = header

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        spec, offset = self._header.arrays[name]
        array: np.ndarray[Any, Any] = ndarray()(spec.shape, spec.dtype, self._buffer, self._base + offset)
        return array

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

    def loose(self) -> LooseView:
        """Return a view of the same block that does not keep the mapping alive."""
        return LooseView(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.verify()


class LooseView(Mapping[str, "np.ndarray[Any, Any]"]):
    """Arrays of a block that may be freed between accesses. Each access looks the block up again.

    An access raises StaleReference if the block was freed, and SegmentMissing if its arena has been unmapped. A
    LooseView never refers to a later arena with the same number.
    """

    __slots__ = ("_arena", "digest", "nbytes", "ref")

    def __init__(self, view: View) -> None:
        """Keep a weak reference to the view's arena. Callers use `View.loose` instead."""
        self.ref = view.ref
        self.digest = view.digest
        self.nbytes = view.nbytes
        self._arena = weak_reference(view.arena)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._view()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._view())

    def __len__(self) -> int:
        return len(self._view())

    def verify(self) -> None:
        """Raise StaleReference if the block was freed, or SegmentMissing if its arena has been unmapped."""
        self._view()

    def _view(self) -> View:
        arena = self._arena()
        if arena is None:
            raise SegmentMissing(f"{self.ref}: the arena of the block was closed")
        return View(arena, self.ref)


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


def release_block(ref: Ref) -> bool:
    """Free a block. Return whether this call freed it. Raise SharedMemoryError if the arena cannot be mapped."""
    try:
        return mapped_arena(ref.arena).release(ref)
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
    release_block(ref)


def _require_ref(ref: Ref) -> None:
    if not isinstance(ref, Ref):
        raise InputError(f"ref is a {type(ref).__name__}; it must be a Ref, such as those of Prompt.refs()")
