"""The owner's side of an arena: a file in /dev/shm with fully reserved space, in which blocks are allocated."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, Self

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.processes.alone import run_alone
from mindie_mm.shm.format.block import Block, BlockPlan, Buffer
from mindie_mm.shm.format.layout import (
    ALLOCATIONS,
    FULL,
    PEAK,
    TAKEN_BACK,
    USED,
    WAITED_NS,
    WAITING,
    WAITS,
    Pieces,
)
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.mapped import close_removed
from mindie_mm.shm.owner.arena_file import ArenaFile
from mindie_mm.shm.owner.heap import Heap
from mindie_mm.shm.owner.queue import Demand, Queue
from mindie_mm.shm.owner.table import Table
from mindie_mm.shm.path_file import record

DEFAULT_TIMEOUT_S = 10.0

# Limit on the cost of sweeps: on average, an allocation checks at most this many published blocks for releases.
_SWEEP_BLOCKS = 16

# Maximum number of pieces of a block. A reader needs one mapping per piece, and the kernel allows 65,530 mappings per
# process by default.
_MAX_PIECES = 1024


class _Filling(NamedTuple):
    """Record of a block that is being filled. If the writer drops the block, a sweep still frees its space."""

    block: weakref.ref[Block]
    entry: int
    pieces: Pieces
    request: bytes
    nbytes: int


class Arena:
    """Arena that this process owns. It is a context manager and thread-safe.

    Only the owner changes the state of a block. Other processes write a release word to request that a block be freed.
    A forked child does not own the arena: `allocate` fails there, and `close` keeps the file. An arena that is never
    closed is removed when it is garbage-collected or when the process exits normally. If a signal handler raises an
    exception while this class changes the arena, the arena becomes `lost`.
    """

    def __init__(self, file: ArenaFile, quota_bytes: int | None) -> None:
        """Take ownership of a new arena file. Callers use `create` instead."""
        self.number = file.header.arena
        """Number of the arena, 0 to 65,535. Its file is `mindie_mm-<4 hex digits>`."""
        self.path = file.path
        self.capacity_bytes = file.header.capacity_bytes
        """Bytes available for blocks, a multiple of the page size."""
        assert file.mapping is not None
        self._file = file
        self._table = Table(memoryview(file.mapping), file.header)
        self._heap = Heap(file.header.data_offset, file.header.file_bytes)
        self._quota_bytes = self.capacity_bytes // 2 if quota_bytes is None else quota_bytes
        self._used_by: dict[bytes, int] = {}  # bytes of the blocks of each request
        self._filling: dict[int, _Filling] = {}
        self._published: dict[int, Block] = {}
        # True while a change is in progress. If an exception interrupts the change, it stays True: the arena is lost.
        self._torn = False
        self._since_sweep = 0
        self.renew_lock()
        _arenas.add(self)

    @classmethod
    def create(cls, capacity_bytes: int, *, quota_bytes: int | None = None) -> Arena:
        """Create an arena.

        The file is complete and locked before it gets its name. If the process dies before that, no file remains.

        Args:
            capacity_bytes: Bytes available for blocks, at least 1. The number is rounded up to whole pages.
            quota_bytes: Maximum total size of the blocks of one path file. None means half the capacity.

        Raises:
            InputError: The capacity or the quota is less than 1 byte.
            SharedMemoryError: /dev/shm does not have enough space, or the file cannot be created.

        """
        if quota_bytes is not None and quota_bytes < 1:
            raise InputError(f"the quota of a request is {quota_bytes} bytes; it must be at least 1")
        return cls(ArenaFile.create(capacity_bytes), quota_bytes)

    @property
    def populated(self) -> Event:
        """Event that is set when the background thread has faulted in every page, or when the arena is closed."""
        return self._file.populated

    @property
    def lost(self) -> bool:
        """True if the arena can allocate no more blocks and must be replaced by a new one.

        There are three possible causes:

        - The arena is closed, or belongs to the parent process.
        - Another program removed, truncated or overwrote the file. Readers then find no blocks, and a write beyond the
          truncated end raises SIGBUS.
        - An exception interrupted a change to the arena. Published blocks then stay readable until the arena is closed.
        """
        with self._mutex:
            return self._is_lost()

    @property
    def used_bytes(self) -> int:
        """Total size in bytes of the blocks that have not been freed. Each size is rounded up to its size class."""
        self.sweep()
        return self.capacity_bytes - self._heap.free_bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are published or being filled."""
        self.sweep()
        return len(self._filling) + len(self._published)

    def allocate(
        self,
        specs: Mapping[str, ArraySpec],
        *,
        path_file: str | Path | None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Block:
        """Allocate a block with uninitialized arrays, and record its reference in the path file.

        The shape word encodes the dtype and shape of the first array. If there is no room, the call blocks the thread,
        and waits in the same queue as `allocate_together`.

        Args:
            specs: Arrays by name, 1 to 64.
            path_file: Path file of the request. If None, only a process that has the reference can free the block.
            timeout_s: Maximum number of seconds to wait for room, at least 0.

        Raises:
            InputError: An argument is invalid.
            LimitExceeded: The block exceeds the arena's capacity, the wire format's limits or the request's quota.
            ArenaFull: There was no room within `timeout_s`.
            SharedMemoryError: The arena is closed or lost, or the path file cannot be written to.

        """
        if not timeout_s >= 0:
            raise InputError(f"the timeout is {timeout_s} s; it must be at least 0")
        demand = Demand([specs], path_file, self._file.header)
        blocks = self._allocate_now(demand) or run_alone(self._waited_for(demand, timeout_s))
        return self._recorded(blocks, demand)[0]

    async def allocate_together(
        self,
        all_specs: Sequence[Mapping[str, ArraySpec]],
        *,
        path_file: str | Path | None,
        timeout_s: float,
        before_wait: Callable[[], object] = lambda: None,
    ) -> list[Block]:
        """Allocate one block for each of `all_specs`, like `allocate`, and wait in the event loop.

        Requests wait in order of arrival, and have no blocks while they wait. A later request may overtake the first
        one if there is room for the later one only. In total, later requests may take at most as many bytes as the
        first one needs. Before a request waits, `before_wait` is called.

        Raises:
            MindieMMError: In the same cases as `allocate`.

        """
        demand = Demand(all_specs, path_file, self._file.header)
        blocks = self._allocate_now(demand)
        if blocks is None:
            before_wait()
            blocks = await self._waited_for(demand, timeout_s)
        return self._recorded(blocks, demand)

    def publish(self, block: Block, digest: bytes) -> None:
        """Publish a block on behalf of `Block.publish`."""
        with self._mutex:
            self._file.require_held()
            if not self._is_filling(block):
                raise SharedMemoryError(f"{block.ref}: the block cannot be published after its context has ended")
            if self._table.is_released(block.entry):
                raise StaleReference(f"{block.ref}: the block was freed while it was being filled")
            block.write_header(digest)
            self._begin_change()
            self._table.publish(block.entry)
            del self._filling[block.entry]
            self._published[block.entry] = block
            self._torn = False
            self._table.ring()  # an earlier sweep ignored any release that arrived while the block was being filled

    def free(self, block: Block) -> None:
        """Free a block immediately. Do nothing if it has been reclaimed already, or if the arena is `lost`.

        `shm.free` with the block's reference would also free a published block, but would map the arena a second time.
        """
        with self._mutex:
            if self._is_lost():
                return
            is_published = self._is_published(block)
            if is_published or self._is_filling(block):
                self._free([block])
                self._file.stats[TAKEN_BACK] += is_published
                if self._queue.line:
                    self._queue.wake_first()

    def sweep(self) -> int:
        """Reclaim the published blocks that a process has freed, and return their number."""
        with self._mutex:
            return self._sweep() if self._file.held and not self._torn else 0

    def close(self) -> None:
        """Remove the arena's file. Idempotent.

        Processes that have mapped the arena can still read their mappings. In a forked child, the file stays.
        """
        with self._mutex:
            self._file.close()
            self._filling.clear()
            self._published.clear()
            self._table.close()
            self._queue.wake_all()
        close_removed()  # this process may also have mapped the arena as a reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew_lock(self) -> None:
        """Replace the lock and the queue. Threads that wait do not exist in a forked child."""
        self._mutex = Lock()
        self._queue = Queue()

    def _is_lost(self) -> bool:
        """Return whether the arena is lost. The caller holds the lock, so no other change is in progress."""
        return self._torn or self._file.lost

    async def _waited_for(self, demand: Demand, timeout_s: float) -> list[Block]:
        """Wait in the queue until a request has its blocks, and return them."""
        try:
            self._queue.join(demand, timeout_s)
            await demand.wait(partial(self._look, demand))
            return demand.take()
        finally:
            self._leave(demand)

    def _look(self, demand: Demand) -> float:
        """Serve the queue. Return 0 if the request has its blocks, otherwise the seconds until it looks again."""
        with self._mutex:
            if not demand.is_served:
                self._require_whole()
                self._file.require_found()
                self._sweep(unasked=self._queue.is_due or demand.left_s <= 0)
                self._queue.serve_if_freed(self._allocate_all)
                self._file.stats[WAITING] = self._queue.nbytes
            return self._queue.pause_s(demand, self._why_full)

    def _leave(self, demand: Demand) -> None:
        """Count a request that has waited. Free the blocks that it did not take, for example after a cancellation."""
        for block in demand.blocks or ():
            self.free(block)
        with self._mutex:
            self._queue.leave(demand)
            if self._file.held:
                # Only the limit on overtaking may have held back the next request.
                self._queue.serve(self._allocate_all)
                self._file.stats[WAITING] = self._queue.nbytes
                self._file.stats[WAITS] += 1
                self._file.stats[FULL] += isinstance(demand.error, ArenaFull)
                self._file.stats[WAITED_NS] += int((time.monotonic() - demand.began_s) * 1e9)

    def _recorded(self, blocks: list[Block], demand: Demand) -> list[Block]:
        """Record the blocks of a request in its path file. Free all of them if that fails."""
        if demand.request:
            try:
                for block in blocks:
                    block.write_header(b"")
                    record(demand.request, self.number, block.entry, block.generation)
            except BaseException:
                for block in blocks:
                    self.free(block)
                raise
        return blocks

    def _allocate_now(self, demand: Demand) -> list[Block] | None:
        """Allocate the blocks of a request that has just arrived, or return None if it has to wait."""
        with self._mutex:
            if not self._queue.line:
                return self._allocate_all(demand)
            if not self._queue.may_pass(demand.nbytes):
                self._require_quota(demand)
                return None
            blocks = self._allocate_all(demand)
            if blocks is not None:
                self._queue.count_passed(demand.nbytes)
            return blocks

    def _allocate_all(self, demand: Demand) -> list[Block] | None:
        """Allocate all blocks of a request, or none if there is no room. The caller holds the lock.

        Raises:
            LimitExceeded: The request's quota is exceeded.
            SharedMemoryError: The arena is lost, or the pieces of a block cannot be mapped.

        """
        self._require_quota(demand)
        self._since_sweep += 1
        if self._table.rung and self._since_sweep * _SWEEP_BLOCKS >= len(self._published):
            self._sweep()
        if demand.nbytes > self._heap.free_bytes:
            self._sweep(unasked=True)
            if demand.nbytes > self._heap.free_bytes:
                return None
        blocks: list[Block] = []
        try:
            for plan in demand.plans:
                block = self._cut(plan, demand.request)
                if block is None:
                    self._sweep(unasked=True)
                    block = self._cut(plan, demand.request) or self._cut(plan, demand.request, in_pieces=True)
                if block is None:
                    self._free(blocks)
                    return None
                blocks.append(block)
        except SharedMemoryError:
            self._free(blocks)
            raise
        return blocks

    def _cut(self, plan: BlockPlan, request: bytes, *, in_pieces: bool = False) -> Block | None:
        """Allocate a block in one piece or in several pieces. Return None if the free space does not suffice."""
        self._begin_change()
        buffer: Buffer | None
        block, pieces = None, self._find(plan, in_pieces=in_pieces)
        if pieces is not None:
            if len(pieces) == 1:
                buffer, (base, nbytes) = self._file.mapping, pieces[0]
                assert buffer is not None
            else:
                buffer, base, nbytes = self._mapped(pieces), 0, sum(piece.nbytes for piece in pieces)
            entry, generation = self._table.allocate(pieces, nbytes)
            block = Block(self, plan, request, entry, generation, pieces, nbytes, buffer, base)
            self._filling[entry] = _Filling(weakref.ref(block), entry, pieces, request, nbytes)
            if request:
                self._used_by[request] = self._used_by.get(request, 0) + nbytes
            stats = self._file.stats
            stats[ALLOCATIONS] += 1
            stats[USED] = used = self.capacity_bytes - self._heap.free_bytes
            stats[PEAK] = max(stats[PEAK], used)
        self._torn = False
        return block

    def _find(self, plan: BlockPlan, *, in_pieces: bool) -> Pieces | None:
        if in_pieces:
            return self._heap.scatter(plan.size, plan.header_bytes, min(self._table.num_free, _MAX_PIECES))
        extent = self._heap.allocate(plan.size) if self._table.num_free else None
        return None if extent is None else (extent,)

    def _mapped(self, pieces: Pieces) -> memoryview:
        try:
            return self._file.map(pieces)
        except SharedMemoryError:  # too many mappings: undo the change, so that the arena is consistent
            for piece in pieces:
                self._heap.free(piece)
            self._torn = False
            raise

    def _sweep(self, *, unasked: bool = False) -> int:
        """Reclaim the published blocks that a process has freed, and return their number. The caller holds the lock.

        Blocks that are being filled stay, unless their writer has dropped them. By default, this method reads the
        release words only if the doorbell was rung or a block was dropped. With `unasked`, it always reads the release
        words. It then also finds a block whose release word was written by a process that died before it rang the
        doorbell.
        """
        dropped = [held for held in self._filling.values() if held.block() is None]
        if not (unasked or dropped or self._table.rung):
            return 0
        self._begin_change()
        self._since_sweep = 0
        self._table.answer()
        is_released = self._table.is_released
        freed = [block for entry, block in self._published.items() if is_released(entry)]
        self._free_each([*dropped, *freed])
        self._torn = False
        self._file.stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def _free(self, blocks: Sequence[Block]) -> None:
        self._begin_change()
        self._free_each(blocks)
        self._torn = False

    def _free_each(self, blocks: Sequence[Block | _Filling]) -> None:
        """Free blocks as a part of a change."""
        for block in blocks:
            self._filling.pop(block.entry, None)
            self._published.pop(block.entry, None)
            self._table.free(block.entry)
            for piece in block.pieces:
                self._heap.free(piece)
            if block.request:
                self._used_by[block.request] -= block.nbytes
                if not self._used_by[block.request]:
                    del self._used_by[block.request]
        self._file.stats[USED] = self.capacity_bytes - self._heap.free_bytes
        self._queue.has_freed |= bool(blocks)

    def _require_quota(self, demand: Demand) -> None:
        """Raise LimitExceeded unless the request may use as many more bytes as it needs."""
        self._require_whole()
        self._file.require_found()
        request, nbytes = demand.request, demand.nbytes
        if request and self._used_by.get(request, 0) + nbytes > self._quota_bytes:
            self._sweep(unasked=True)
            if (used := self._used_by.get(request, 0)) + nbytes > self._quota_bytes:
                raise LimitExceeded(
                    f"the request needs {nbytes} bytes and already holds {used} bytes; a request may hold at most "
                    f"{self._quota_bytes} bytes of an arena"
                )

    def _why_full(self) -> str:
        return (
            f"{self._heap.free_bytes} of {self.capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in "
            f"one piece; {self._table.num_free} of {self._file.header.num_entries} entries are free"
        )

    def _is_filling(self, block: Block) -> bool:
        held = self._filling.get(block.entry)
        return held is not None and held.block() is block

    def _is_published(self, block: Block) -> bool:
        return self._published.get(block.entry) is block

    def _begin_change(self) -> None:
        self._require_whole()
        self._torn = True

    def _require_whole(self) -> None:
        if self._torn:
            raise SharedMemoryError(
                f"an exception interrupted a change to arena {self.path}; close the arena and create a new one"
            )


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _renew_locks() -> None:
    for arena in _arenas:
        arena.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
