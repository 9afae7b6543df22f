"""Wires. A wire stores media items and writes the handle words that refer to them into the prompt.

An item is stored in a block of an arena, in a block of a file, or in segments in MindIE's format (`mindie_wires.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from mindie_mm.errors import SharedMemoryError, naming
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Plan
from mindie_mm.processes import faults
from mindie_mm.shm import Arena, ArraySpec, DiskArena, collect
from mindie_mm.shm.format.item import ITEM
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt, put_words

WireName = Literal["native", "mindie"]
ItemToStore = tuple[PlannedItem, Callable[[], bytes]]
"""An item, and a function that computes the digest of its content."""
ARENA_BYTES = 256 * 2**20
"""Default capacity in bytes of an arena that a tokenizer creates."""


class Wire(ABC):
    """Storage for media items."""

    needs_path_file: ClassVar[bool] = True
    """Whether stored items are freed through a path file."""

    def check(self, plan: Plan, kind: Kind) -> None:
        """Raise LimitExceeded if an item has too few placeholders for its handle words.

        One placeholder suffices unless a wire overrides this method. InputError is raised if the wire cannot store the
        item at all.
        """

    @abstractmethod
    def fill(self, prompt: Prompt, items: Sequence[ItemToStore], path_file: Path | None, undo: ExitStack) -> Prompt:
        """Store the items of a prompt, and return the prompt with their handle words.

        Args:
            prompt: Prompt without handle words. It has one span per item.
            items: Items to store.
            path_file: File that records the references to free.
            undo: Stack for callbacks that free the items.

        Raises:
            ArenaFull: The arena has no free memory for an item.
            SharedMemoryError: Shared memory cannot be used. The errors of `item.write` are raised, too.

        """

    def close(self) -> None:
        """Release the wire's own resources. This may be called repeatedly."""


class ItemWire(Wire):
    """A wire whose handle words refer to one item each."""

    def fill(self, prompt: Prompt, items: Sequence[ItemToStore], path_file: Path | None, undo: ExitStack) -> Prompt:
        words: list[Sequence[int]] = []
        for item, digest in items:
            with naming(item.name):
                words.append(self.store(item, digest, path_file, undo))
        return put_words(prompt, words)

    @abstractmethod
    def store(
        self, item: PlannedItem, digest: Callable[[], bytes], path_file: Path | None, undo: ExitStack
    ) -> Sequence[int]:
        """Allocate, write and publish an item, and return its handle words. Push a callback that frees it onto `undo`.

        Args:
            item: Item to store.
            digest: Function that computes the digest of the content, for a wire that stores the digest.
            path_file: File that records the references to free.
            undo: Stack for the callback.

        This method raises the same errors as `fill`.

        """


class NativeWire(ItemWire):
    """A wire with one block per item.

    An item has a name word and a shape word, or only a name word if the item has a single placeholder.
    """

    def __init__(
        self,
        arena: Arena | None = None,
        preprocessed: Preprocessed | None = None,
        make: Callable[[], Arena] | None = None,
    ) -> None:
        """Create a wire for `arena`, or for its own arena.

        Its own arena is created at the first item, and removed on `close` or at a normal exit. If memory does not
        suffice for the arena, memory of killed processes is reclaimed first. If another program removes the arena, the
        wire creates a new one. For example, systemd-logind removes arenas when the user logs out (RemoveIPC).

        Args:
            arena: Arena to use, or None for the wire's own arena.
            preprocessed: Cache of preprocessed media, or None for no cache.
            make: Function that creates the wire's own arena, by default with ARENA_BYTES.

        """
        self._arena, self._is_own = arena, arena is None
        self._make = make or partial(Arena.create, ARENA_BYTES)
        self._preprocessed = preprocessed or Preprocessed()

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

    def store(
        self, item: PlannedItem, digest: Callable[[], bytes], path_file: Path | None, undo: ExitStack
    ) -> Sequence[int]:
        arena, content = self.open(), digest()
        try:
            return self._stored(arena, item, content, path_file, undo)
        except SharedMemoryError:
            if (another := self.open()) is arena:
                raise
            return self._stored(another, item, content, path_file, undo)

    def close(self) -> None:
        if self._is_own and self._arena is not None:
            self._arena.close()
            self._arena = None

    def _stored(
        self, arena: Arena, item: PlannedItem, content: bytes, path_file: Path | None, undo: ExitStack
    ) -> Sequence[int]:
        with arena.allocate(item.specs, path_file=path_file) as block:
            faults.point("allocated")
            block[ITEM][...] = item.shape.values
            faults.point("mid-fill")
            if not self._preprocessed.copy(content, block):
                assert item.write is not None
                item.write(block)
                self._preprocessed.keep(content, {name: block[name] for name in item.plan.specs})
            faults.point("filled")
            ref = block.publish(content)
        faults.point("published")
        undo.callback(arena.free, block)
        return ref.to_words()


class DiskWire(ItemWire):
    """A wire with one block per item in a file on disk. Items are never freed."""

    needs_path_file: ClassVar[bool] = False

    def __init__(self) -> None:
        self.arena: DiskArena | None = None
        """Arena for the next items. The code that sets this attribute also closes the arena."""
        self.stored: list[tuple[bytes, Mapping[str, ArraySpec]]] = []
        """Digest and array specs of each item, in order. The code that reads this list also empties it."""

    def store(
        self, item: PlannedItem, digest: Callable[[], bytes], path_file: Path | None, undo: ExitStack
    ) -> Sequence[int]:
        assert self.arena is not None
        undo.callback(self.arena.roll_back, self.arena.num_blocks)
        with self.arena.allocate(item.specs) as block:
            block[ITEM][...] = item.shape.values
            assert item.write is not None
            item.write(block)
            content = digest()
            words = block.publish(content).to_words()
        self.stored.append((content, item.specs))
        return words
