"""A block that is being filled by its store's writer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from mindie_mm.shm.format.block_header import BlockPlan
from mindie_mm.shm.format.extent import Pieces
from mindie_mm.shm.format.ref import Ref
from mindie_mm.shm.format.spec import ndarray

if TYPE_CHECKING:
    import numpy as np


Buffer = mmap.mmap | memoryview


class Store(Protocol):
    """What holds blocks."""

    number: int
    """0 to 65,535: the arena of a reference."""

    def publish(self, block: Block, digest: bytes | None) -> None: ...

    def discard(self, block: Block) -> None: ...


class Block(Mapping[str, "np.ndarray[Any, Any]"]):
    """Named arrays to write into, then `publish`. Leaving it without `publish` frees it, as does dropping it.

    Once it is published nobody writes to it; once it is left its arrays are not used any more.
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
        """For a store's `allocate`."""
        self.plan = plan
        self.request = request
        """Path of the request's path file; empty if it has none."""
        self.entry = entry
        self.generation = generation
        self.pieces = pieces
        """Where it lies in the store's file."""
        self.nbytes = nbytes
        """Bytes that it takes there."""
        self._store = store
        self._buffer, self._base = buffer, base
        self._published = False

    @property
    def ref(self) -> Ref:
        """The reference to hand on once the block is published."""
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
        """For a store: what the block says of itself; an empty `digest` if it is not to be cached."""
        header = self.plan.header(self.entry, self.generation, self.request, digest)
        self._buffer[self._base : self._base + len(header)] = header

    def publish(self, digest: bytes | None = None) -> Ref:
        """Makes the block readable by its reference; never reads the data. Once: a second call changes nothing.

        `digest`: 16 to 64 bytes over all arrays and the preprocessing settings; without one the item is never cached.
        StaleReference if the block was freed meanwhile: its request is over.
        """
        if not self._published:
            self._store.publish(self, digest)
            self._published = True
        return self.ref

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._published:
            self._store.discard(self)
