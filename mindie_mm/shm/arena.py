"""The owner's side: one file in /dev/shm, reserved whole, out of which blocks are cut."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock
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

# Of those that wait behind another one and are told when it is their turn, lest an exception of its kept it from that.
_LOOK_S = 1.0

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
    child owns nothing: there `allocate` fails, and `close` leaves the file alone. What nobody closes is removed when
    it is dropped, or when the process ends well.

    What blocks there are is told by `_filling` and `_published` alone: heap, table and quotas follow from them. An
    exception of a signal handler may break off a change of these at any line; `_torn` then stays, and whoever is next
    makes them anew.
    """

    def __init__(self, header: ArenaHeader, lock: LifeLock, mapping: mmap.mmap, quota_bytes: int | None) -> None:
        """For `create`."""
        self.number = header.arena
        """0 to 65,535: the file `mindie_mm-<4 hex digits>`."""
        self.path = SHM_DIRECTORY / file_name(header.arena)
        self.capacity_bytes = header.capacity_bytes
        """Bytes for blocks, in whole pages."""
        self._lock = lock
        words = memoryview(mapping)
        self._stats = words[STATS_OFFSET : STATS_OFFSET + STATS_BYTES].cast("Q")
        self._populator = Populator(MADV_POPULATE_WRITE, partial(self._stats.__setitem__, POPULATED))
        # Not weakref's: a child that multiprocessing forks, such as a DataLoader's worker, leaves by os._exit.
        self._finalizer = Finalize(self, _remove, (self.path, lock, self._populator), exitpriority=0)
        self._data_offset, self._file_bytes = header.data_offset, header.file_bytes
        self._header = header.pack()
        self._num_entries = header.num_entries
        self._mapping: mmap.mmap | None = mapping
        self._table = Table(words, header)
        self._heap = Heap(self._data_offset, self._file_bytes)
        self._filling: dict[int, weakref.ref[Block]] = {}
        self._published: dict[int, Block] = {}
        self._quotas = Quotas(header.capacity_bytes // 2 if quota_bytes is None else quota_bytes)
        self._torn = False
        self._since_sweep = 0
        self._seen_ns = 0
        self.renew_lock()
        _arenas.add(self)
        self._populator.start(mapping)

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
        """Set once every page is faulted in, which goes on in the background, or it is closed."""
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
        path_file: str | Path | None,
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
                self._require_quota(plan, request)
                self._stats[WAITS] += 1
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
            if not self._is_filling(block):
                raise SharedMemoryError(f"{block.ref}: the block was left, it cannot be published")
            if self._table.is_released(block.entry):
                raise StaleReference(f"{block.ref}: the block was freed while it was filled")
            block.write_header(digest or b"")
            self._begin_change()
            self._table.publish(block.entry)
            del self._filling[block.entry]
            self._published[block.entry] = block
            self._torn = False
            self._table.ring()  # a release that came while the block was filled may have been swept past

    def discard(self, block: Block) -> None:
        """For `Block`: gives back a block whose `publish` did not return. Nothing if the arena is `lost`."""
        with self._mutex:
            if not self.lost and (self._is_filling(block) or self._published.get(block.entry) is block):
                self._begin_change()
                self._give_back([block])

    def free(self, block: Block) -> None:
        """Takes back a published block of this arena at once; nothing if somebody did, or if the arena is `lost`.

        As `free` of its reference, for which a process maps the arena a second time, to read it.
        """
        with self._mutex:
            if not self.lost and self._published.get(block.entry) is block:
                self._begin_change()
                self._give_back([block])
                self._stats[TAKEN_BACK] += 1

    def sweep(self) -> int:
        """Takes back the published blocks that any process freed; their number."""
        with self._mutex:
            return self._sweep()

    def close(self) -> None:
        """Removes the arena: readers that map it keep their pages. Idempotent; a forked child only lets go."""
        self._populator.stop()
        self._populator.join()  # which maps it: else there may be no room for another one at once
        with self._mutex:
            _remove(self.path, self._lock, self._populator)
            self._finalizer.cancel()
            self._mapping = None
            self._filling.clear()
            self._published.clear()
            self._table.close()
            self._stats = memoryview(b"")
            self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._lock.held:
            raise SharedMemoryError(f"arena {self.path} is closed, or another process's")

    def renew_lock(self) -> None:
        """For a forked child: whichever thread held the lock, or waited, is not there to go on."""
        self._mutex = Lock()
        self._queue: deque[SimpleQueue[None]] = deque()

    def _is_filling(self, block: Block) -> bool:
        found = self._filling.get(block.entry)
        return found is not None and found() is block

    def _begin_change(self) -> None:
        """Of which blocks there are; `_torn` is set until it is done."""
        if self._torn:
            self._mend()
        self._torn = True

    def _mend(self) -> None:
        """Makes heap, table and quotas anew from the blocks that there are; broken off, it is done again."""
        filling = [block for found in self._filling.values() if (block := found()) is not None]
        self._filling = {block.entry: weakref.ref(block) for block in filling}
        blocks = [*filling, *self._published.values()]
        self._heap = Heap(self._data_offset, self._file_bytes, [piece for block in blocks for piece in block.pieces])
        self._table.keep([block.entry for block in blocks])
        self._table.ring()  # it may have been a sweep
        self._quotas = Quotas(self._quotas.limit_bytes)
        for block in blocks:
            self._quotas.add(block.request, block.nbytes)
        self._stats[USED] = self.capacity_bytes - self._heap.free_bytes
        self._torn = False

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
        expires_ns = now_ns + lease_ns if lease_ns else 0
        block = self._cut(self._place, plan, request, now_ns, expires_ns)
        if block is None:
            self._sweep(unasked=True)
            block = self._cut(self._place, plan, request, now_ns, expires_ns)
        return block or self._cut(self._scatter, plan, request, now_ns, expires_ns)

    def _cut(
        self, find: Callable[[BlockPlan], Place | None], plan: BlockPlan, request: bytes, now_ns: int, expires_ns: int
    ) -> Block | None:
        """A new block where `find` finds room for it."""
        self._begin_change()
        block, place = None, find(plan)
        if place is not None:
            pieces, buffer, base, nbytes = place
            entry, generation = self._table.take(pieces[0][0], nbytes, now_ns, expires_ns)
            if len(pieces) > 1:
                self._table.link(entry, pieces[1:])
            block = Block(self, plan, request, entry, generation, pieces, nbytes, buffer, base)
            self._filling[entry] = weakref.ref(block)
            self._quotas.add(request, nbytes)
            stats = self._stats
            stats[ALLOCATIONS] += 1
            stats[USED] = used = self.capacity_bytes - self._heap.free_bytes
            stats[PEAK] = max(stats[PEAK], used)
        self._torn = False
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
        return None if pieces is None else (tuple(pieces), self._map(pieces), 0, sum(nbytes for _, nbytes in pieces))

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
        """Waits behind those that came before. ArenaFull after the deadline."""
        deadline = time.monotonic() + timeout_s
        # Not a Condition: its wait may leave its lock to others when it is broken off.
        ticket: SimpleQueue[None] = SimpleQueue()
        try:
            self._queue.append(ticket)
            while True:
                with self._mutex:
                    first = self._queue[0] is ticket
                    block = self._take(plan, request, lease_ns) if first else None
                    left = deadline - time.monotonic()
                    if block is None and left <= 0:
                        self._stats[FULL] += 1
                        raise ArenaFull(self._why_full(plan.size, timeout_s))
                if block is not None:
                    return block
                with suppress(Empty):
                    ticket.get(timeout=min(left, POLL_S if first else _LOOK_S))
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._wake()

    def _wake(self) -> None:
        """Those that wait look again."""
        for ticket in tuple(self._queue):
            ticket.put(None)

    def _why_full(self, size: int, timeout_s: float) -> str:
        return (
            f"no room for a block of {size} bytes within {timeout_s} s: {self._heap.free_bytes} of "
            f"{self.capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in one piece; "
            f"{self._table.num_free} of {self._num_entries} entries are free"
        )

    def _sweep(self, *, unasked: bool = False) -> int:
        """Blocks still being filled stay: their writer gives them back.

        Without the doorbell there is nothing to do, unless a process died before it rang, a lease ran out, or a block
        was dropped while it was filled.
        """
        if not self._lock.held:
            return 0
        if any(found() is None for found in self._filling.values()):
            self._torn = True
        if not (unasked or self._torn or self._table.rung):
            return 0
        self._begin_change()
        self._since_sweep = 0
        self._table.answer()
        if unasked:
            self._end_leases()
        is_released = self._table.is_released
        freed = [block for entry, block in self._published.items() if is_released(entry)]
        self._give_back(freed)
        self._stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def _end_leases(self) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for entry in self._published:
            if self._table.is_expired(entry, now_ns):
                self._table.release(entry)

    def _give_back(self, blocks: Sequence[Block]) -> None:
        """Ends the change in which these blocks go."""
        for block in blocks:
            self._filling.pop(block.entry, None)
            self._published.pop(block.entry, None)
            self._table.give_back(block.entry)
            for offset, nbytes in block.pieces:
                self._heap.free(offset, nbytes)
            self._quotas.remove(block.request, block.nbytes)
        self._stats[USED] = self.capacity_bytes - self._heap.free_bytes
        self._torn = False
        if blocks:
            self._wake()


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _renew_locks() -> None:
    for arena in _arenas:
        arena.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _remove(path: Path, lock: LifeLock, populator: Populator) -> None:
    """Idempotent, and nothing to the file in a forked child."""
    populator.stop()
    if lock.held:
        unlink_same(path, lock.descriptor)
    lock.release()


def _absolute(path: str | Path) -> bytes:
    """Path.absolute, in a quarter of its time."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InputError(f"path file {os.fspath(path)!r} has a NUL in it")
    return encoded if encoded.startswith(b"/") else os.fsencode(Path(path).absolute())


def _lease_ns(lease_s: float, path_file: str | Path | None) -> int:
    if path_file is not None:
        raise InputError(f"a lease of {lease_s} s for a block of {path_file}: its request says how long it lives")
    if not 0 <= lease_s <= _MAX_LEASE_S:
        raise InputError(f"a lease of {lease_s} s; it must be 0 to {_MAX_LEASE_S}")
    return max(1, int(lease_s * 1e9))
