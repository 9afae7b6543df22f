"""The owner's side: one file in /dev/shm, reserved whole, out of which blocks are cut."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Condition, Event, Lock
from types import TracebackType
from typing import Self

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.shm import path_file as ledger
from mindie_mm.shm.arena_file import create_file
from mindie_mm.shm.block import Block, Buffer, Pieces
from mindie_mm.shm.block_header import BlockPlan, check_digest
from mindie_mm.shm.heap import Heap
from mindie_mm.shm.layout import SHM_DIRECTORY, ArenaHeader, file_name
from mindie_mm.shm.life import LifeLock, unlink_same
from mindie_mm.shm.nameless import reopened
from mindie_mm.shm.populate import MADV_POPULATE_WRITE, Populator
from mindie_mm.shm.quota import Quotas
from mindie_mm.shm.scatter import map_pieces
from mindie_mm.shm.spec import ArraySpec
from mindie_mm.shm.stats import (
    ALLOCATIONS,
    FULL,
    PEAK,
    POPULATED,
    STATS_BYTES,
    STATS_OFFSET,
    TAKEN_BACK,
    USED,
    WAITS,
)
from mindie_mm.shm.table import Table

DEFAULT_TIMEOUT_S = 10.0

# Other processes free by a plain store, which wakes nobody.
POLL_S = 0.001

# How often the owner looks whether its file still has its name.
_LOOK_NS = 1_000_000

# Published blocks looked at, on average, for each allocation while others free.
_SWEEP_BLOCKS = 16

# Of one block: each takes a mapping in every process that reads it, and a process may have 65,530 of them.
_MAX_PIECES = 1024

_MAX_LEASE_S = 10**9

Place = tuple[Pieces, Buffer, int, int]
"""Where a block lies: its pieces, what they are mapped in, where in that, bytes in all."""


class Arena:
    """An arena of this process: a context manager, and safe to use from many threads of it.

    One writer, many readers: only the owner changes the state of a block; others ask by a release word. A forked
    child owns nothing: there `allocate` fails, and `close` leaves the file alone.
    """

    def __init__(self, header: ArenaHeader, lock: LifeLock, mapping: mmap.mmap, quota_bytes: int | None) -> None:
        """For `create`."""
        self.number = header.arena
        """0 to 65,535: the file `mindie_mm-<4 hex digits>`."""
        self.path = SHM_DIRECTORY / file_name(header.arena)
        self.capacity_bytes = header.capacity_bytes
        """Bytes for blocks, in whole pages."""
        self._lock = lock
        self._file_bytes = header.file_bytes
        self._header = header.pack()
        self._num_entries = header.num_entries
        self._mapping: mmap.mmap | None = mapping
        words = memoryview(mapping)
        self._table = Table(words, header)
        self._stats = words[STATS_OFFSET : STATS_OFFSET + STATS_BYTES].cast("Q")
        self._heap = Heap(header.data_offset, header.file_bytes)
        self._filling: dict[int, Block] = {}
        self._published: dict[int, Block] = {}
        self._quotas = Quotas(header.capacity_bytes // 2 if quota_bytes is None else quota_bytes)
        self._since_sweep = 0
        self._mutex = Lock()
        self._room = Condition(self._mutex)
        self._queue: deque[object] = deque()
        self._seen_ns = 0
        self._populator = Populator(mapping, MADV_POPULATE_WRITE, partial(self._stats.__setitem__, POPULATED))

    @classmethod
    def create(cls, capacity_bytes: int, *, quota_bytes: int | None = None) -> Arena:
        """Makes an arena: complete and locked when its name appears, nothing at all if the process dies before.

        `quota_bytes`: most that the blocks of one path file may take together; None: half the capacity. InputError
        for less than a byte, SharedMemoryError if /dev/shm has no room for it.
        """
        if quota_bytes is not None and quota_bytes < 1:
            raise InputError(f"a quota of {quota_bytes} bytes for a request; it takes at least 1")
        return cls(*create_file(capacity_bytes), quota_bytes)

    @property
    def populated(self) -> Event:
        """Set once every page is faulted in, which goes on in the background."""
        return self._populator.done

    @property
    def lost(self) -> bool:
        """Whether it is closed, or another program removed, cut or overwrote its file: readers find nothing there.

        Writing where it was cut would end this process.
        """
        if self._mapping is None or not self._lock.held:
            return True
        status = os.fstat(self._lock.descriptor)
        return (
            status.st_nlink == 0
            or status.st_size != self._file_bytes
            or self._mapping[: len(self._header)] != self._header
        )

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that nobody freed, by size class."""
        self.sweep()
        return self.capacity_bytes - self._heap.free_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks being filled or published."""
        self.sweep()
        return len(self._filling) + len(self._published)

    def allocate(
        self,
        specs: Mapping[str, ArraySpec],
        *,
        path_file: Path | None,
        lease_s: float | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Block:
        """A block with these arrays, uninitialised; its reference is recorded in `path_file` before it is handed out.

        Without a path file it has an owner in nobody but its reference; after `lease_s` seconds, if given, anybody
        may free it. The words carry the first array's dtype and shape. Waits for room, served in order, then
        ArenaFull. LimitExceeded for what no arena of this size, no word, or no quota can hold.
        """
        request = b"" if path_file is None else _absolute(path_file)
        lease_ns = 0 if lease_s is None else _lease_ns(lease_s, path_file)
        if not timeout_s >= 0:
            raise InputError(f"a timeout of {timeout_s} s; it must be at least 0")
        plan = BlockPlan.of(specs, request)
        if plan.size > self.capacity_bytes:
            raise LimitExceeded(f"a block of {plan.size} bytes; the arena has {self.capacity_bytes}")
        with self._mutex:
            block = None if self._queue else self._take(plan, request, lease_ns)
            if block is None:
                block = self._wait_for_room(plan, request, lease_ns, timeout_s)
        if path_file is not None:
            try:
                block.write_header(b"")
                ledger.record(request, self.number, block.entry, block.generation)
            except BaseException:
                self.discard(block)
                raise
        return block

    def publish(self, block: Block, digest: bytes | None) -> None:
        """For `Block.publish`: header, then the state word, written last."""
        if digest is not None:
            check_digest(digest)
        with self._mutex:
            self._require_open()
            if self._filling.get(block.entry) is not block:
                raise SharedMemoryError(f"{block.ref}: the block was left, it cannot be published")
            if self._table.is_released(block.entry):
                raise StaleReference(f"{block.ref}: the block was freed while it was filled")
            block.write_header(digest or b"")
            del self._filling[block.entry]
            self._published[block.entry] = block
            self._table.publish(block.entry)
            self._table.ring()  # a release that came while the block was filled may have been swept past

    def discard(self, block: Block) -> None:
        """For `Block`: gives back a block that is not published. Nothing after `close`."""
        with self._mutex:
            if self._lock.held and self._filling.get(block.entry) is block:
                del self._filling[block.entry]
                self._give_back(block)
                if self._queue:
                    self._room.notify_all()

    def free(self, block: Block) -> None:
        """Takes back a published block of this arena at once; nothing if somebody did, or if the arena is `lost`.

        As `free` of its reference, for which a process maps the arena a second time, to read it.
        """
        with self._mutex:
            if not self.lost and self._published.get(block.entry) is block:
                del self._published[block.entry]
                self._give_back(block)
                self._stats[TAKEN_BACK] += 1
                if self._queue:
                    self._room.notify_all()

    def sweep(self) -> int:
        """Takes back the published blocks that any process freed; their number."""
        with self._mutex:
            swept = self._sweep()
            if swept and self._queue:
                self._room.notify_all()
            return swept

    def close(self) -> None:
        """Removes the arena: readers that map it keep their pages. Idempotent; a forked child only lets go."""
        self._populator.stop()
        with self._mutex:
            if self._lock.held:
                unlink_same(self.path, self._lock.descriptor)
            self._lock.release()
            self._mapping = None
            self._filling.clear()
            self._published.clear()
            self._table.close()
            self._stats = memoryview(b"")
            self._room.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._lock.held:
            raise SharedMemoryError(f"arena {self.path} is closed, or another process's")

    def _take(self, plan: BlockPlan, request: bytes, lease_ns: int) -> Block | None:
        """A new block, being filled; None while there is no room."""
        self._require_open()
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if now_ns - self._seen_ns > _LOOK_NS:
            self._look(now_ns)
        self._since_sweep += 1
        if self._table.rung and self._since_sweep * _SWEEP_BLOCKS >= len(self._published):
            self._sweep()
        self._require_quota(plan, request)
        place = self._place(plan) or (self._place(plan) if self._sweep(unasked=True) else None) or self._scatter(plan)
        if place is None:
            return None
        pieces, buffer, base, nbytes = place
        expires_ns = now_ns + lease_ns if lease_ns else 0
        entry, generation = self._table.take(pieces[0][0], nbytes, now_ns, expires_ns)
        if len(pieces) > 1:
            self._table.link(entry, pieces[1:])
        self._filling[entry] = block = Block(self, plan, request, entry, generation, pieces, nbytes, buffer, base)
        if request:
            self._quotas.add(request, nbytes)
        stats = self._stats
        stats[ALLOCATIONS] += 1
        stats[USED] = used = self.capacity_bytes - self._heap.free_bytes
        stats[PEAK] = max(stats[PEAK], used)
        return block

    def _look(self, now_ns: int) -> None:
        if self.lost:
            raise SharedMemoryError(f"arena {self.path} was removed, cut or overwritten by others; make a new one")
        self._seen_ns = now_ns

    def _place(self, plan: BlockPlan) -> Place | None:
        """In one piece; None while none is large enough, or every entry is used."""
        extent = self._heap.allocate(plan.size) if self._table.num_free else None
        assert self._mapping is not None
        return None if extent is None else ((extent,), self._mapping, *extent)

    def _scatter(self, plan: BlockPlan) -> Place | None:
        """In several pieces, mapped one behind another; None if too little is free, or in pieces too small.

        SharedMemoryError if they cannot be mapped.
        """
        pieces = self._heap.scatter(plan.size, plan.header_bytes, min(self._table.num_free, _MAX_PIECES))
        if pieces is None:
            return None
        try:
            return tuple(pieces), self._map(pieces), 0, sum(nbytes for _, nbytes in pieces)
        except BaseException:
            for piece in pieces:
                self._heap.free(*piece)
            raise

    def _map(self, pieces: Sequence[tuple[int, int]]) -> memoryview:
        descriptor = reopened(self._lock.descriptor)
        try:
            return map_pieces(descriptor, pieces, writable=True)
        finally:
            os.close(descriptor)

    def _require_quota(self, plan: BlockPlan, request: bytes) -> None:
        if request and not self._quotas.has_room(request, plan.size):
            self._sweep(unasked=True)
            self._quotas.require(request, plan.size)

    def _wait_for_room(self, plan: BlockPlan, request: bytes, lease_ns: int, timeout_s: float) -> Block:
        """Waits behind those that came before. ArenaFull after the deadline; LimitExceeded at once."""
        self._require_quota(plan, request)
        deadline = time.monotonic() + timeout_s
        ticket = object()
        self._queue.append(ticket)
        self._stats[WAITS] += 1
        try:
            while True:
                first = self._queue[0] is ticket
                block = self._take(plan, request, lease_ns) if first else None
                if block is not None:
                    return block
                left = deadline - time.monotonic()
                if left <= 0:
                    self._stats[FULL] += 1
                    raise ArenaFull(self._why_full(plan.size, timeout_s))
                self._room.wait(min(left, POLL_S) if first else left)
        finally:
            self._queue.remove(ticket)
            if self._queue:
                self._room.notify_all()

    def _why_full(self, size: int, timeout_s: float) -> str:
        return (
            f"no room for a block of {size} bytes within {timeout_s} s: {self._heap.free_bytes} of "
            f"{self.capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in one piece; "
            f"{self._table.num_free} of {self._num_entries} entries are free"
        )

    def _sweep(self, *, unasked: bool = False) -> int:
        """Blocks still being filled stay: their writer gives them back.

        Without the doorbell there is nothing to do, unless a process died before it rang, or a lease ran out.
        """
        if not self._lock.held or not (unasked or self._table.rung):
            return 0
        self._since_sweep = 0
        self._table.answer()
        if unasked:
            self._end_leases()
        is_released = self._table.is_released
        freed = [block for entry, block in self._published.items() if is_released(entry)]
        for block in freed:
            del self._published[block.entry]
            self._give_back(block)
        self._stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def _end_leases(self) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for entry in self._published:
            if self._table.is_expired(entry, now_ns):
                self._table.release(entry)

    def _give_back(self, block: Block) -> None:
        self._table.give_back(block.entry)
        for offset, nbytes in block.pieces:
            self._heap.free(offset, nbytes)
        self._stats[USED] = self.capacity_bytes - self._heap.free_bytes
        if block.request:
            self._quotas.remove(block.request, block.nbytes)


def _absolute(path: Path) -> bytes:
    """Path.absolute, in a quarter of its time."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InputError(f"path file {os.fspath(path)!r} has a NUL in it")
    return encoded if encoded.startswith(b"/") else os.fsencode(path.absolute())


def _lease_ns(lease_s: float, path_file: Path | None) -> int:
    if path_file is not None:
        raise InputError(f"a lease of {lease_s} s for a block of {path_file}: its request says how long it lives")
    if not 0 <= lease_s <= _MAX_LEASE_S:
        raise InputError(f"a lease of {lease_s} s; it must be 0 to {_MAX_LEASE_S}")
    return max(1, int(lease_s * 1e9))
