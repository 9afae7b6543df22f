"""The owner's side of an arena: a file in /dev/shm with fully reserved space, in which blocks are allocated."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, Self

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.settings.paths import absolute
from mindie_mm.shm.format.block import Block, BlockPlan, Buffer, check_digest
from mindie_mm.shm.format.layout import (
    ALLOCATIONS,
    FULL,
    PAGE,
    PEAK,
    TAKEN_BACK,
    USED,
    WAITED_NS,
    WAITING,
    WAITS,
    Pieces,
    round_up,
)
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.mapped import drop_removed
from mindie_mm.shm.owner.arena_file import ArenaFile
from mindie_mm.shm.owner.heap import Heap, size_class
from mindie_mm.shm.owner.table import Table
from mindie_mm.shm.owner.waiting import WaitingLine
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

        The shape word encodes the dtype and shape of the first array. If there is no room, the call waits. Waiting
        threads get room in order of arrival.

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
        request = b"" if path_file is None else _absolute(path_file)
        if not timeout_s >= 0:
            raise InputError(f"the timeout is {timeout_s} s; it must be at least 0")
        plan = BlockPlan.of(specs, request)
        if plan.size > self.capacity_bytes:
            raise LimitExceeded(
                f"the block has {plan.size} bytes; the limit is {self.capacity_bytes}, the capacity of the arena"
            )
        with self._mutex:
            block = None if self._line.tickets else self._take(plan, request)
            if block is None:
                self._file.require_held()
                self._require_quota(request, plan.size)
                self._file.stats[WAITS] += 1
        if block is None:
            block = self._line.wait(partial(self._take, plan, request), timeout_s)
        if block is None:
            with self._mutex:
                self._file.require_held()
                self._file.stats[FULL] += 1
                why = self._why_full()
            raise ArenaFull(f"no room for a block of {plan.size} bytes within {timeout_s} s: {why}")
        if path_file is not None:
            self._record([block], request)
        return block

    def try_allocate(
        self, all_specs: Sequence[Mapping[str, ArraySpec]], *, path_file: str | Path
    ) -> list[Block] | None:
        """Allocate one block for each of `all_specs`, like `allocate`, but without waiting.

        Returns:
            The blocks, or None if there is not enough room for all of them. In that case, no block is allocated.

        Raises:
            LimitExceeded: The arena or the request's quota could never hold these blocks together.
            SharedMemoryError: The arena is closed or lost.

        """
        request = _absolute(path_file)
        plans = [BlockPlan.of(specs, request) for specs in all_specs]
        total = self._require(plans, request)
        blocks: list[Block] = []
        with self._mutex:
            self._file.require_found(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
            self._sweep()
            if total > self._heap.free_bytes:
                return None
            try:
                for plan in plans:
                    block = self._take(plan, request)
                    if block is None:
                        break
                    blocks.append(block)
            finally:
                if len(blocks) < len(plans):
                    self._free(blocks)
        if len(blocks) < len(plans):
            return None
        self._record(blocks, request)
        return blocks

    def require(self, all_specs: Sequence[Mapping[str, ArraySpec]], path_file: str | Path) -> int:
        """Return the total size of the blocks of `all_specs` in bytes.

        Raises:
            LimitExceeded: The arena or the request's quota could never hold these blocks together.

        """
        request = _absolute(path_file)
        return self._require([BlockPlan.of(specs, request) for specs in all_specs], request)

    def count_waiting(self, waiting_bytes: int) -> None:
        """Set the number of bytes that requests are waiting for. `/metrics` shows this number."""
        with self._mutex:
            if self._file.held:
                self._file.stats[WAITING] = waiting_bytes

    def count_wait(self, seconds: float, *, in_vain: bool) -> None:
        """Count a request that has waited for room. `in_vain` is True if the request got no room."""
        with self._mutex:
            if self._file.held:
                self._file.stats[WAITS] += 1
                self._file.stats[FULL] += in_vain
                self._file.stats[WAITED_NS] += int(seconds * 1e9)

    def why_full(self) -> str:
        """Describe the free space, for an error message."""
        with self._mutex:
            self._file.require_held()
            return self._why_full()

    def publish(self, block: Block, digest: bytes | None) -> None:
        """Publish a block on behalf of `Block.publish`."""
        if digest is not None:
            check_digest(digest)
        with self._mutex:
            self._file.require_held()
            if not self._is_filling(block):
                raise SharedMemoryError(f"{block.ref}: the block cannot be published after its context has ended")
            if self._table.is_released(block.entry):
                raise StaleReference(f"{block.ref}: the block was freed while it was being filled")
            block.write_header(digest or b"")
            self._begin_change()
            self._table.publish(block.entry)
            del self._filling[block.entry]
            self._published[block.entry] = block
            self._torn = False
            self._table.ring()  # an earlier sweep ignored any release that arrived while the block was being filled

    def discard(self, block: Block) -> None:
        """Free a block on behalf of `Block` if `publish` was not called or failed. Do nothing in a `lost` arena."""
        with self._mutex:
            if not self._is_lost() and (self._is_filling(block) or self._is_published(block)):
                self._free([block])
                self._line.wake()

    def free(self, block: Block) -> None:
        """Free a published block immediately. Do nothing if it has been reclaimed already, or if the arena is `lost`.

        `shm.free` with the block's reference would also free the block, but would map the arena a second time.
        """
        with self._mutex:
            if not self._is_lost() and self._is_published(block):
                self._free([block])
                self._file.stats[TAKEN_BACK] += 1
                self._line.wake()

    def sweep(self) -> int:
        """Reclaim the published blocks that a process has freed, and return their number."""
        with self._mutex:
            freed = self._sweep() if self._file.held and not self._torn else 0
            if freed:
                self._line.wake()
            return freed

    def close(self) -> None:
        """Remove the arena's file. Idempotent.

        Processes that have mapped the arena can still read their mappings. In a forked child, the file stays.
        """
        with self._mutex:
            self._file.close()
            self._filling.clear()
            self._published.clear()
            self._table.close()
            self._line.wake()
        drop_removed()  # this process may also have mapped the arena as a reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew_lock(self) -> None:
        """Replace the lock and the queue of waiting threads. These threads do not exist in a forked child."""
        self._mutex = Lock()
        self._line = WaitingLine(self._mutex)

    def _is_lost(self) -> bool:
        """Return whether the arena is lost. The caller holds the lock, so no other change is in progress."""
        return self._torn or self._file.lost

    def _require(self, plans: Sequence[BlockPlan], request: bytes) -> int:
        sizes = [plan.size for plan in plans]
        # If space is short, the last block can get whole pages instead of its full size class.
        others = sum(map(size_class, sizes[:-1]))
        total = others + sum(round_up(size, PAGE) for size in sizes[-1:])
        if total > self.capacity_bytes:
            raise LimitExceeded(
                f"the request's media take {total} bytes of shared memory; the arena has only {self.capacity_bytes} "
                "bytes (--arena-bytes)"
            )
        if len(plans) > (num_entries := self._file.header.num_entries):
            raise LimitExceeded(
                f"the request has {len(plans)} media items; the limit is {num_entries}, the number of entries of the "
                "arena"
            )
        with self._mutex:
            self._require_quota(request, others + sum(sizes[-1:]))
        return total

    def _record(self, blocks: Sequence[Block], request: bytes) -> None:
        """Record the blocks of a request in its path file. Free all of them if that fails."""
        try:
            for block in blocks:
                block.write_header(b"")
                record(request, self.number, block.entry, block.generation)
        except BaseException:
            for block in blocks:
                self.discard(block)
            raise

    def _take(self, plan: BlockPlan, request: bytes) -> Block | None:
        """Allocate a block for filling, or return None if there is no room. The caller holds the lock.

        Raises:
            LimitExceeded: The request's quota is exceeded.
            SharedMemoryError: The arena is lost, or the block's pieces cannot be mapped.

        """
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._file.require_found(now_ns)
        self._since_sweep += 1
        if self._table.rung and self._since_sweep * _SWEEP_BLOCKS >= len(self._published):
            self._sweep()
        self._require_quota(request, plan.size)
        block = self._cut(plan, request, now_ns)
        if block is None:
            self._sweep(unasked=True)
            block = self._cut(plan, request, now_ns)
        return block or self._cut(plan, request, now_ns, in_pieces=True)

    def _cut(self, plan: BlockPlan, request: bytes, now_ns: int, *, in_pieces: bool = False) -> Block | None:
        """Allocate a block in one piece or in several pieces. Return None if the free space does not suffice."""
        self._begin_change()
        block, pieces = None, self._find_several(plan) if in_pieces else self._find_one(plan)
        if pieces is not None:
            buffer: Buffer | None
            if len(pieces) == 1:
                buffer, (base, nbytes) = self._file.mapping, pieces[0]
            else:
                buffer, base, nbytes = self._mapped(pieces), 0, sum(piece.nbytes for piece in pieces)
            assert buffer is not None
            entry, generation = self._table.take(pieces, nbytes, now_ns)
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

    def _find_one(self, plan: BlockPlan) -> Pieces | None:
        extent = self._heap.allocate(plan.size) if self._table.num_free else None
        return None if extent is None else (extent,)

    def _find_several(self, plan: BlockPlan) -> Pieces | None:
        return self._heap.scatter(plan.size, plan.header_bytes, min(self._table.num_free, _MAX_PIECES))

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
        words, and thus also finds a block if the process that wrote its release word died before it rang the doorbell.
        """
        dropped = [held for held in self._filling.values() if held.block() is None]
        if not (unasked or dropped or self._table.rung):
            return 0
        self._begin_change()
        self._since_sweep = 0
        self._table.answer()
        is_released = self._table.is_released
        freed = [block for entry, block in self._published.items() if is_released(entry)]
        self._give_back([*dropped, *freed])
        self._torn = False
        self._file.stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def _free(self, blocks: Sequence[Block]) -> None:
        self._begin_change()
        self._give_back(blocks)
        self._torn = False

    def _give_back(self, blocks: Sequence[Block | _Filling]) -> None:
        """Free blocks as a part of a change."""
        for block in blocks:
            self._filling.pop(block.entry, None)
            self._published.pop(block.entry, None)
            self._table.give_back(block.entry)
            for piece in block.pieces:
                self._heap.free(piece)
            if block.request:
                self._used_by[block.request] -= block.nbytes
                if not self._used_by[block.request]:
                    del self._used_by[block.request]
        self._file.stats[USED] = self.capacity_bytes - self._heap.free_bytes

    def _require_quota(self, request: bytes, size: int) -> None:
        """Raise LimitExceeded unless the request may use `size` more bytes."""
        self._require_whole()
        if request and self._used_by.get(request, 0) + size > self._quota_bytes:
            self._sweep(unasked=True)
            used = self._used_by.get(request, 0)
            if used + size > self._quota_bytes:
                raise LimitExceeded(
                    f"the block has {size} bytes and its request already holds {used} bytes; a request may hold at "
                    f"most {self._quota_bytes} bytes of an arena"
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


def _absolute(path: str | Path) -> bytes:
    """Return the encoded absolute path. If `path` is already absolute, this is four times as fast as `absolute`."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InputError(f"path file {os.fspath(path)!r} contains a NUL character")
    return encoded if encoded.startswith(b"/") else os.fsencode(absolute(path))
