"""Which blocks an arena has: where each lies, its entry in the table, and whose quota it counts against."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from mindie_mm.errors import SharedMemoryError, StaleReference
from mindie_mm.shm.format.block_header import BlockPlan
from mindie_mm.shm.format.extent import Pieces
from mindie_mm.shm.format.stats import ALLOCATIONS, PEAK, TAKEN_BACK, USED
from mindie_mm.shm.memory.block import Block, Buffer, Store
from mindie_mm.shm.owner.arena_file import ArenaFile
from mindie_mm.shm.owner.heap import Heap
from mindie_mm.shm.owner.quota import Quotas
from mindie_mm.shm.owner.table import Table

# Published blocks looked at, on average, for each allocation while others free.
_SWEEP_BLOCKS = 16

# Of one block: each takes a mapping in every process that reads it, and a process may have 65,530 of them.
_MAX_PIECES = 1024


class _Filling(NamedTuple):
    """A block that is being filled. Whoever fills the block may drop it, and what it takes is still known."""

    block: weakref.ref[Block]
    entry: int
    pieces: Pieces
    request: bytes
    nbytes: int


class Inventory:
    """For one thread at a time, and while the arena is its process's.

    A signal handler may raise an exception at any line of a change. Therefore each change lies between `_begin_change`
    and `torn = False`, in one method. After an interrupted change `torn` stays True, and every further change raises
    SharedMemoryError.
    """

    def __init__(self, file: ArenaFile, quota_bytes: int | None) -> None:
        """For a new arena's `file`. `quota_bytes` as in `Arena.create`."""
        self._file = file
        self._capacity_bytes = file.header.capacity_bytes
        assert file.mapping is not None
        self._table = Table(memoryview(file.mapping), file.header)
        self._heap = Heap(file.header.data_offset, file.header.file_bytes)
        self._quotas = Quotas(self._capacity_bytes // 2 if quota_bytes is None else quota_bytes)
        self._filling: dict[int, _Filling] = {}
        self._published: dict[int, Block] = {}
        self.torn = False
        """Whether an exception interrupted a change, so that the arena is of no use any more; True during a change."""
        self._since_sweep = 0

    def __len__(self) -> int:
        """Blocks being filled or published."""
        return len(self._filling) + len(self._published)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks, by size class."""
        return self._capacity_bytes - self._heap.free_bytes

    def allocate(self, store: Store, plan: BlockPlan, request: bytes, lease_ns: int, now_ns: int) -> Block | None:
        """A new block of `store`, being filled; None while there is no room. LimitExceeded beyond the quota.

        SharedMemoryError if it takes several pieces, and they cannot be mapped.
        """
        self._since_sweep += 1
        if self._table.rung and self._since_sweep * _SWEEP_BLOCKS >= len(self._published):
            self.sweep()
        self.require_quota(request, plan.size)
        expires_ns = now_ns + lease_ns if lease_ns else 0
        block = self._cut(self._in_one_piece, store, plan, request, now_ns, expires_ns)
        if block is None:
            self.sweep(unasked=True)
            block = self._cut(self._in_one_piece, store, plan, request, now_ns, expires_ns)
        return block or self._cut(self._in_pieces, store, plan, request, now_ns, expires_ns)

    def require_quota(self, request: bytes, size: int) -> None:
        """LimitExceeded if a block of `size` bytes is more than the request may hold with what it has."""
        self._require_whole()
        if request and not self._quotas.has_room(request, size):
            self.sweep(unasked=True)
            self._quotas.require(request, size)

    def publish(self, block: Block, digest: bytes) -> None:
        """Header, then the state word, written last. SharedMemoryError if it was left, StaleReference if freed."""
        if not self._is_filling(block):
            raise SharedMemoryError(f"{block.ref}: the block was left, it cannot be published")
        if self._table.is_released(block.entry):
            raise StaleReference(f"{block.ref}: the block was freed while it was filled")
        block.write_header(digest)
        self._begin_change()
        self._table.publish(block.entry)
        del self._filling[block.entry]
        self._published[block.entry] = block
        self.torn = False
        self._table.ring()  # a release that came while the block was filled may have been swept past

    def discard(self, block: Block) -> bool:
        """Gives back a block that is filled or published; False if it is not there any more."""
        is_there = self._is_filling(block) or self._published.get(block.entry) is block
        if is_there:
            self._begin_change()
            self._give_back(block)
            self.torn = False
        return is_there

    def free(self, block: Block) -> bool:
        """Gives back a published block; False if it is not there any more."""
        is_there = self._published.get(block.entry) is block
        if is_there:
            self._begin_change()
            self._give_back(block)
            self.torn = False
            self._file.stats[TAKEN_BACK] += 1
        return is_there

    def sweep(self, *, unasked: bool = False) -> int:
        """Takes back the published blocks that anybody freed; their number.

        Blocks still being filled stay: their writer gives them back. Without the doorbell there is nothing to do,
        unless a process died before it rang, a lease ran out, or a block was dropped while it was filled.
        """
        dropped = [held for held in self._filling.values() if held.block() is None]
        if not (unasked or dropped or self._table.rung):
            return 0
        self._begin_change()
        self._since_sweep = 0
        self._table.answer()
        if unasked:
            self._end_leases()
        is_released = self._table.is_released
        freed = [block for entry, block in self._published.items() if is_released(entry)]
        gone: list[Block | _Filling] = [*dropped, *freed]
        for block in gone:
            self._give_back(block)
        self.torn = False
        self._file.stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def why_full(self) -> str:
        """What is free, in words for an error."""
        return (
            f"{self._heap.free_bytes} of {self._capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in "
            f"one piece; {self._table.num_free} of {self._file.header.num_entries} entries are free"
        )

    def close(self) -> None:
        """Lets go of the blocks and of the file."""
        self._filling.clear()
        self._published.clear()
        self._table.close()

    def _is_filling(self, block: Block) -> bool:
        held = self._filling.get(block.entry)
        return held is not None and held.block() is block

    def _begin_change(self) -> None:
        self._require_whole()
        self.torn = True

    def _require_whole(self) -> None:
        if self.torn:
            raise SharedMemoryError(
                f"an exception interrupted a change of arena {self._file.path}; close the arena and make a new one"
            )

    def _cut(
        self,
        find: Callable[[BlockPlan], Pieces | None],
        store: Store,
        plan: BlockPlan,
        request: bytes,
        now_ns: int,
        expires_ns: int,
    ) -> Block | None:
        """A new block where `find` finds room for it."""
        self._begin_change()
        block, pieces = None, find(plan)
        if pieces is not None:
            buffer: Buffer | None
            if len(pieces) == 1:
                buffer, (base, nbytes) = self._file.mapping, pieces[0]
            else:
                buffer, base, nbytes = self._mapped(pieces), 0, sum(piece.nbytes for piece in pieces)
            assert buffer is not None
            entry, generation = self._table.take(pieces, nbytes, now_ns, expires_ns)
            block = Block(store, plan, request, entry, generation, pieces, nbytes, buffer, base)
            self._filling[entry] = _Filling(weakref.ref(block), entry, pieces, request, nbytes)
            if request:
                self._quotas.add(request, nbytes)
            stats = self._file.stats
            stats[ALLOCATIONS] += 1
            stats[USED] = used = self._capacity_bytes - self._heap.free_bytes
            stats[PEAK] = max(stats[PEAK], used)
        self.torn = False
        return block

    def _mapped(self, pieces: Pieces) -> memoryview:
        try:
            return self._file.map(pieces)
        except SharedMemoryError:  # too many mappings: the arena is as good as before
            for piece in pieces:
                self._heap.free(piece)
            self.torn = False
            raise

    def _in_one_piece(self, plan: BlockPlan) -> Pieces | None:
        """An extent for the whole block; None while none is large enough, or every entry is used."""
        extent = self._heap.allocate(plan.size) if self._table.num_free else None
        return None if extent is None else (extent,)

    def _in_pieces(self, plan: BlockPlan) -> Pieces | None:
        """Several extents for a block; None if too little is free, or in pieces too small."""
        return self._heap.scatter(plan.size, plan.header_bytes, min(self._table.num_free, _MAX_PIECES))

    def _end_leases(self) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for entry in self._published:
            if self._table.is_expired(entry, now_ns):
                self._table.release(entry)

    def _give_back(self, block: Block | _Filling) -> None:
        self._filling.pop(block.entry, None)
        self._published.pop(block.entry, None)
        self._table.give_back(block.entry)
        for piece in block.pieces:
            self._heap.free(piece)
        if block.request:
            self._quotas.remove(block.request, block.nbytes)
        self._file.stats[USED] = self._capacity_bytes - self._heap.free_bytes
