"""Block that a writer fills."""

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
    """Container of blocks: an `Arena` or a `DiskArena`."""

    number: int
    """Arena number in references to the blocks, 0 to 65,535."""

    def publish(self, block: Block, digest: bytes | None) -> None:
        """Make a filled block readable. If `digest` is not None, caches use it as the key of the block's contents."""

    def discard(self, block: Block) -> None:
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
            ArenaFull: The disk of a `DiskArena` is full.

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
