"""The readers' side of blocks: attach, verify, free. Any process, no lock shared with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self
from weakref import ref as weak_reference

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm.format.layout import fence
from mindie_mm.shm.format.ref import Ref
from mindie_mm.shm.format.spec import ndarray
from mindie_mm.shm.reader.mapped import MappedArena, mapped_arena

if TYPE_CHECKING:
    import numpy as np


class View(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of a published block: read-only, over the arena's own pages. They keep the mapping alive.

    Whoever consumes it calls `verify` after its copy, or leaves it as a context manager: until then the arrays may
    already be another content's.
    """

    __slots__ = ("_base", "_buffer", "_header", "arena", "digest", "ref")

    def __init__(self, arena: MappedArena, ref: Ref) -> None:
        """For `attach`."""
        self._buffer, self._base, header = arena.block(ref)
        self.ref = ref
        """The reference that was attached."""
        self.digest = header.digest
        """Names the content and its preprocessing; None if the block is not to be cached."""
        self.arena = arena
        """Where the block lies."""
        self._header = header

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        spec, offset = self._header.arrays[name]
        array: np.ndarray[Any, Any] = ndarray()(spec.shape, spec.dtype, self._buffer, self._base + offset)
        return array

    def file_offset(self, name: str) -> tuple[MappedArena, int] | None:
        """The arena, and where in its file the array lies; None where it lies there in pieces."""
        if self._buffer is not self.arena.map:
            return None
        return self.arena, self._base + self._header.arrays[name].offset

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.arrays)

    def __len__(self) -> int:
        return len(self._header.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(spec.nbytes for spec, _ in self._header.arrays.values())

    def verify(self) -> None:
        """StaleReference if the block was freed, or freed and used again, since it was attached."""
        fence()
        self.arena.check(self.ref)

    def loose(self) -> LooseView:
        """Return the same block as a view that keeps no mapping alive."""
        return LooseView(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.verify()


class LooseView(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of a block that may be freed before they are used again. Each use looks the block up.

    A use raises StaleReference if the block was freed, and SegmentMissing if its arena is no longer mapped. A later
    arena of the same number is not looked at.
    """

    __slots__ = ("_arena", "digest", "nbytes", "ref")

    def __init__(self, view: View) -> None:
        """For `View.loose`."""
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
        """Raise StaleReference or SegmentMissing if the block was freed, or its arena is gone."""
        self._view()

    def _view(self) -> View:
        arena = self._arena()
        if arena is None:
            raise SegmentMissing(f"{self.ref}: its arena is gone")
        return View(arena, self.ref)


def attach(ref: Ref) -> View:
    """The arrays of a published block, without a copy.

    StaleReference if it was freed since, SegmentMissing if its arena is gone, truncated, replaced or damaged,
    CorruptReference if dtype or shape are not the block's, SharedMemoryError if the arena cannot be mapped.
    """
    try:
        arena = mapped_arena(ref.arena)
    except SegmentMissing as error:
        raise SegmentMissing(f"{ref}: {error}") from error
    view = View(arena, ref)
    arena.populate()
    return view


def release_block(ref: Ref) -> bool:
    """Frees a block and says whether this call did it."""
    try:
        return mapped_arena(ref.arena).release(ref)
    except SegmentMissing:
        return False


def free(ref: Ref) -> None:
    """Frees a block. Idempotent, from any process; a missing arena or a block freed before is fine."""
    release_block(ref)
