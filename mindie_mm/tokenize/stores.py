"""Stores. A store keeps the arrays of media items, and writes the handle words that refer to them into the prompt.

An item is stored in a block of an arena, or in segments in MindIE's format (`mindie_stores.py`). The shards of batch
runs are another store (`mindie_mm.batch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal, Self

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from mindie_mm.errors import LimitExceeded, SharedMemoryError, naming
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Plan
from mindie_mm.processes import faults
from mindie_mm.processes.alone import gather_in_order
from mindie_mm.shm import Arena, Block, collect
from mindie_mm.shm.format.item import ITEM
from mindie_mm.shm.owner.arena import DEFAULT_TIMEOUT_S
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import Prompt, Words, put_words
from mindie_mm.tokenize.setup import Setup

WireName = Literal["native", "mindie"]
ARENA_BYTES = 256 * 2**20
"""Default capacity in bytes of an arena that a tokenizer creates."""

_LEAST_FEATURE_BYTES = 16
"""Minimum size of an item's arrays in bytes per feature, in any family."""
_Arrays = Mapping[str, NDArray[Any]]


class Writer(ABC):
    """An object that writes the items of a request."""

    @abstractmethod
    async def write(self, item: PlannedItem, arrays: Mapping[str, NDArray[Any]]) -> bytes:
        """Write the arrays of an item, and return the digest of its content, or b"" if the store keeps no digests."""

    @abstractmethod
    async def digest(self, item: PlannedItem) -> bytes:
        """Return the digest of an item's content without decoding the item."""

    @abstractmethod
    def let_go(self) -> None:
        """Let other requests use the decoder that is reserved for this request, because it is going to wait."""


class Store(ABC):
    """Storage for media items."""

    needs_path_file: ClassVar[bool] = True
    """True if stored items are freed through a path file."""
    preprocessed: Preprocessed | None = None
    """Cache of preprocessed media. None if the store does not store digests."""

    def check(self, plan: Plan, kind: Kind) -> None:
        """Raise LimitExceeded if an item has too few placeholders for its handle words, or more than fit in the store.

        One placeholder suffices unless a store overrides this method. InputError is raised if the store cannot store
        the item at all.
        """

    @abstractmethod
    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        """Store the items of prompts, and return the prompts with their handle words. If this fails, free all items.

        Args:
            prompts: Prompts without handle words. They have one span per item.
            items: Items to store.
            path_file: File that records the references to free.
            writer: Object that writes the items.

        Raises:
            ArenaFull: The arena has no free memory for an item.
            SharedMemoryError: Shared memory cannot be used. The errors of `Writer.write` are raised, too.

        """

    def close(self) -> None:
        """Release the store's own resources. This may be called repeatedly."""


class ArenaStore(Store):
    """A store in an arena whose memory several requests share.

    The store's own arena is created at the first item, and removed on `close` or at a normal exit. If memory does not
    suffice for the arena, memory of killed processes is reclaimed first. If another program removes the arena, the
    store creates a new one. For example, systemd-logind removes arenas when the user logs out (RemoveIPC).
    """

    def __init__(
        self,
        arena: Arena | None = None,
        *,
        capacity_bytes: int | None = None,
        quota_bytes: int | None = None,
        wait_s: float = DEFAULT_TIMEOUT_S,
        preprocessed: Preprocessed | None = None,
    ) -> None:
        """Create a store.

        Args:
            arena: Arena to use, or None for the store's own arena.
            capacity_bytes: Capacity of the store's own arena, by default ARENA_BYTES.
            quota_bytes: Maximum number of bytes of a request in the store's own arena. None means half the capacity.
            wait_s: Maximum time in seconds that a request waits for memory.
            preprocessed: Cache of preprocessed media, or None for no cache.

        """
        self._arena, self._is_own = arena, arena is None
        self.capacity_bytes = (capacity_bytes or ARENA_BYTES) if arena is None else arena.capacity_bytes
        """Maximum total size of the arrays of all items."""
        self._make = partial(Arena.create, self.capacity_bytes, quota_bytes=quota_bytes)
        self._wait_s = wait_s
        self.preprocessed = preprocessed or Preprocessed()

    @classmethod
    def of(cls, setup: Setup, arena: Arena | None = None) -> Self:
        """Return the store of a tokenizer with these settings, in `arena` or in its own arena."""
        return cls(
            arena,
            capacity_bytes=setup.arena_bytes,
            quota_bytes=setup.arena_request_bytes,
            wait_s=setup.arena_wait_s,
            preprocessed=Preprocessed(setup.preprocessed_cache_bytes),
        )

    def open(self) -> Arena:
        """Return the arena. Create it if it does not exist or is lost. Raise SharedMemoryError if creation fails."""
        if self._is_own and self._arena is not None and self._arena.lost:
            self.close()
        if self._arena is None:
            try:
                self._arena = self._make()
            except SharedMemoryError:
                collect()
                self._arena = self._make()
        return self._arena

    def check(self, plan: Plan, kind: Kind) -> None:
        # A compromised decoder could return so many features that the prompt's ids use all memory.
        if plan.num_features > (most := self.capacity_bytes // _LEAST_FEATURE_BYTES):
            raise LimitExceeded(f"the item has {plan.num_features} features; the arena has room for at most {most}")

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        arena = self._arena or self.open()
        try:
            words = await self._store(arena, items, path_file, writer)
        except SharedMemoryError:
            if (another := self.open()) is arena:
                raise
            words = await self._store(another, items, path_file, writer)
        left = iter(words)
        return [put_words(prompt, islice(left, len(prompt.spans))) for prompt in prompts]

    async def _store(
        self, arena: Arena, items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Words]:
        blocks = await arena.allocate_together(
            [item.specs for item in items],
            path_file=path_file,
            timeout_s=self._wait_s,
            before_wait=writer.let_go,
        )
        try:
            faults.point("allocated")
            filling = [_fill(item, block, writer) for item, block in zip(items, blocks, strict=True)]
            words = await gather_in_order(filling)
        except BaseException:
            for block in blocks:
                arena.free(block)
            raise
        faults.point("published")
        return words

    def close(self) -> None:
        if self._is_own and self._arena is not None:
            self._arena.close()
            self._arena = None


async def _fill(item: PlannedItem, block: Block, writer: Writer) -> Words:
    """Write the arrays of an item, publish its block, and return its handle words."""
    block[ITEM][...] = item.shape.values
    faults.point("mid-fill")
    with naming(item.name):
        digest = await writer.write(item, {name: block[name] for name in item.plan.specs})
    faults.point("filled")
    return block.publish(digest).to_words()


class Preprocessed:
    """Arrays of media items, by the digest of the item's content. The least recently used arrays are evicted.

    Several threads may use a cache at the same time. The lock is not held while arrays are copied, because an event
    loop may wait for the lock.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._items = LRUCache[bytes, _Arrays](capacity_bytes, getsizeof=_nbytes)
        self._lock = Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._items

    def fits(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` bytes fit in the cache."""
        return nbytes <= self._items.maxsize

    def copy(self, digest: bytes, arrays: _Arrays) -> bool:
        """Copy the arrays cached under `digest` into `arrays`, by name. Return False if there are none."""
        with self._lock:
            kept = self._items.get(digest)
        if kept is None:
            return False
        for name, array in kept.items():
            arrays[name][...] = array
        return True

    def keep(self, digest: bytes, arrays: _Arrays) -> None:
        """Cache a copy of `arrays` under `digest`, unless they are larger than the cache."""
        if not self.fits(_nbytes(arrays)) or digest in self._items:
            return
        try:
            copied = {name: np.array(array) for name, array in arrays.items()}
        except MemoryError:  # the item is complete without a cached copy
            return
        with self._lock:
            self._items[digest] = copied


def _nbytes(arrays: _Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
