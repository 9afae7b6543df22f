"""The owner's side: one file in /dev/shm, reserved whole, out of which blocks are cut."""

from __future__ import annotations

import mmap
import secrets
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Event
from types import TracebackType
from typing import Self

from mindie_mm.errors import ArenaFull, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.shm import path_file as ledger
from mindie_mm.shm.arena_file import create_file
from mindie_mm.shm.block import Block
from mindie_mm.shm.block_header import BlockHeader, BlockPlan, check_digest
from mindie_mm.shm.heap import Heap
from mindie_mm.shm.layout import (
    ALLOCATED_NS,
    DOORBELL,
    FILLING,
    FREE,
    OFFSET,
    PAGE,
    PUBLISHED,
    SHM_DIRECTORY,
    SIZE,
    STATE,
    WORDS_PER_ENTRY,
    ArenaHeader,
    fence,
    file_name,
    state_word,
)
from mindie_mm.shm.life import LifeLock, unlink_same
from mindie_mm.shm.populate import MADV_POPULATE_WRITE, Populator
from mindie_mm.shm.ref import Ref
from mindie_mm.shm.spec import ArraySpec
from mindie_mm.shm.words import MAX_GENERATION, pack_dims

DEFAULT_TIMEOUT_S = 10.0

# Other processes free by a plain store, which wakes nobody.
POLL_S = 0.001


class Arena:
    """An arena of this process: a context manager, and safe to use from many threads of it.

    One writer, many readers: only the owner changes the state of a block; others ask by a release word. A forked
    child owns nothing: there `allocate` fails, and `close` leaves the file alone.
    """

    def __init__(self, header: ArenaHeader, lock: LifeLock, mapping: mmap.mmap) -> None:
        """For `create`."""
        self.number = header.arena
        """0 to 65,535: the file `mindie_mm-<4 hex digits>`."""
        self.path = SHM_DIRECTORY / file_name(header.arena)
        self.capacity_bytes = header.capacity_bytes
        """Bytes for blocks, in whole pages."""
        self._lock = lock
        self._mapping: mmap.mmap | None = mapping
        words = memoryview(mapping)
        self._entries = words[PAGE : header.releases_offset].cast("Q")
        self._releases = words[header.releases_offset : header.data_offset].cast("Q")
        self._heap = Heap(header.data_offset, header.file_bytes)
        # Oldest first: an entry rests as long as it can before it is used again.
        self._free_entries = deque(range(header.num_entries))
        # Random, so that a reused arena number matches no old reference.
        self._generations = [secrets.randbelow(MAX_GENERATION) + 1] * header.num_entries
        self._filling: dict[int, Ref] = {}
        self._published: dict[int, Ref] = {}
        self._condition = Condition()
        self._queue: deque[object] = deque()
        self._populator = Populator(mapping, MADV_POPULATE_WRITE)

    @classmethod
    def create(cls, capacity_bytes: int) -> Arena:
        """Makes an arena: complete and locked when its name appears, nothing at all if the process dies before.

        InputError for less than a byte, SharedMemoryError if /dev/shm has no room for it.
        """
        return cls(*create_file(capacity_bytes))

    @property
    def populated(self) -> Event:
        """Set once every page is faulted in, which goes on in the background."""
        return self._populator.done

    @property
    def populated_fraction(self) -> float:
        """How much of the arena is faulted in, 0 to 1."""
        return self._populator.fraction

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that nobody freed, in whole pages."""
        self.sweep()
        return self.capacity_bytes - self._heap.free_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks being filled or published."""
        self.sweep()
        return len(self._filling) + len(self._published)

    def allocate(
        self, specs: Mapping[str, ArraySpec], *, path_file: Path | None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Block:
        """A block with these arrays, uninitialised; its reference is recorded in `path_file` before it is handed out.

        The words carry the first array's dtype and shape. Waits for room, served in order, then ArenaFull.
        LimitExceeded for what no arena of this size, or no word, can hold.
        """
        plan = BlockPlan.of(specs, "" if path_file is None else str(path_file.absolute()))
        first = next(iter(specs.values()))
        pack_dims(first.shape)
        if plan.size > self.capacity_bytes:
            raise LimitExceeded(f"a block of {plan.size} bytes; the arena has {self.capacity_bytes}")
        entry, offset = self._wait_for_room(plan.size, timeout_s)
        ref = Ref(self.number, entry, self._generations[entry], first.dtype, first.shape)
        try:
            block = Block(self, ref, plan, self._open_mapping(), offset)
            self._write_header(ref, plan, offset, None)
            if path_file is not None:
                ledger.record(path_file, ref)
        except BaseException:
            self.discard(ref)
            raise
        return block

    def publish(self, ref: Ref, plan: BlockPlan, offset: int, digest: bytes | None) -> None:
        """For `Block.publish`: header, then the state word, written last."""
        if digest is not None:
            check_digest(digest)
        self._open_mapping()
        if self._releases[1 + ref.block] == ref.generation:
            raise StaleReference(f"{ref}: the block was freed while it was filled")
        if digest is not None:
            self._write_header(ref, plan, offset, digest)
        fence()
        with self._condition:
            del self._filling[ref.block]
            self._published[ref.block] = ref
            self._entries[WORDS_PER_ENTRY * ref.block + STATE] = state_word(ref.generation, PUBLISHED)
            # A release that came while the block was filled may have been swept past.
            self._releases[DOORBELL] = 1

    def discard(self, ref: Ref) -> None:
        """For `Block`: gives back a block that is not published. Nothing after `close`."""
        with self._condition:
            if self._mapping is not None and self._filling.pop(ref.block, None) is not None:
                self._give_back(ref)
                self._condition.notify_all()

    def sweep(self) -> int:
        """Takes back the published blocks that any process freed; their number."""
        with self._condition:
            swept = self._sweep()
            if swept:
                self._condition.notify_all()
            return swept

    def close(self) -> None:
        """Removes the arena: readers that map it keep their pages. Idempotent; a forked child only lets go."""
        self._populator.stop()
        with self._condition:
            if self._lock.held:
                unlink_same(self.path, self._lock.descriptor)
            self._lock.release()
            self._mapping = None
            self._entries = self._releases = memoryview(b"")
            self._condition.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None or not self._lock.held:
            raise SharedMemoryError(f"arena {self.path} is closed, or another process's")
        return self._mapping

    def _wait_for_room(self, size: int, timeout_s: float) -> tuple[int, int]:
        """(entry, offset) of a block being filled. ArenaFull after the deadline."""
        deadline = time.monotonic() + timeout_s
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
            try:
                while True:
                    self._require_file()
                    if self._queue[0] is ticket:
                        self._sweep()
                        taken = self._take(size)
                        if taken is None and self._sweep(unasked=True):
                            taken = self._take(size)
                        if taken is not None:
                            return taken
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ArenaFull(self._why_full(size, timeout_s))
                    self._condition.wait(min(left, POLL_S) if self._queue[0] is ticket else left)
            finally:
                self._queue.remove(ticket)
                if self._queue:
                    self._condition.notify_all()

    def _require_file(self) -> None:
        self._open_mapping()
        if not self.path.exists():
            raise SharedMemoryError(f"arena {self.path} was removed by another program; make a new one")

    def _why_full(self, size: int, timeout_s: float) -> str:
        return (
            f"no room for a block of {size} bytes within {timeout_s} s: {self._heap.free_bytes} of "
            f"{self.capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in one piece; "
            f"{len(self._free_entries)} of {len(self._generations)} entries are free"
        )

    def _take(self, size: int) -> tuple[int, int] | None:
        if not self._free_entries:
            return None
        extent = self._heap.allocate(size)
        if extent is None:
            return None
        entry = self._free_entries.popleft()
        generation, (offset, nbytes) = self._generations[entry], extent
        at = WORDS_PER_ENTRY * entry
        self._entries[at + STATE] = state_word(generation, FILLING)
        self._releases[1 + entry] = 0
        self._entries[at + OFFSET], self._entries[at + SIZE] = offset, nbytes
        self._entries[at + ALLOCATED_NS] = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._filling[entry] = Ref(self.number, entry, generation)
        fence()  # whoever sees new content also sees that the old block is gone
        return entry, offset

    def _sweep(self, *, unasked: bool = False) -> int:
        """Blocks still being filled stay: their writer gives them back.

        Without the doorbell there is nothing to do, unless a process died before it rang.
        """
        if self._mapping is None or not (unasked or self._releases[DOORBELL]):
            return 0
        self._releases[DOORBELL] = 0
        fence()
        releases = self._releases
        freed = [ref for entry, ref in self._published.items() if releases[1 + entry] == ref.generation]
        for ref in freed:
            del self._published[ref.block]
            self._give_back(ref)
        return len(freed)

    def _give_back(self, ref: Ref) -> None:
        at = WORDS_PER_ENTRY * ref.block
        self._entries[at + STATE] = state_word(ref.generation, FREE)
        self._heap.free(self._entries[at + OFFSET], self._entries[at + SIZE])
        self._generations[ref.block] = ref.generation % MAX_GENERATION + 1
        self._free_entries.append(ref.block)

    def _write_header(self, ref: Ref, plan: BlockPlan, offset: int, digest: bytes | None) -> None:
        header = BlockHeader(ref.block, ref.generation, plan.arrays, plan.request, digest).pack()
        self._open_mapping()[offset : offset + len(header)] = header
