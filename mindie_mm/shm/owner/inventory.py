"""Blocks of an arena, with their extents, table entries and quotas."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from mindie_mm.errors import SharedMemoryError, StaleReference
from mindie_mm.shm.format.block import Block, BlockPlan, Buffer, Store
from mindie_mm.shm.format.layout import ALLOCATIONS, PEAK, TAKEN_BACK, USED, Pieces
from mindie_mm.shm.owner.arena_file import ArenaFile
from mindie_mm.shm.owner.heap import Heap
from mindie_mm.shm.owner.quota import Quotas
from mindie_mm.shm.owner.table import Table

# Limit on the cost of sweeps: on average, an allocation checks at most this many published blocks for releases.
_SWEEP_BLOCKS = 16

# Maximum number of pieces of a block. A reader needs one mapping per piece, and the kernel allows 65,530 mappings per
# process by default.
_MAX_PIECES = 1024


class _Filling(NamedTuple):
    """Record of a block that is being filled. If the writer drops the block, `sweep` still frees its space."""

    block: weakref.ref[Block]
    entry: int
    pieces: Pieces
    request: bytes
    nbytes: int


class Inventory:
    """Blocks of an arena, for the process that owns the arena. Not thread-safe.

    A signal handler may raise an exception while a method changes the arena. Therefore each method that changes the
    arena calls `_begin_change` before the change, and sets `torn` to False after the change. If an exception interrupts
    the change, `torn` stays True, and every further change raises SharedMemoryError.
    """

    def __init__(self, file: ArenaFile, quota_bytes: int | None) -> None:
        """Create an inventory without blocks. `quota_bytes` has the same meaning as in `Arena.create`."""
        self._file = file
        self._capacity_bytes = file.header.capacity_bytes
        assert file.mapping is not None
        self._table = Table(memoryview(file.mapping), file.header)
        self._heap = Heap(file.header.data_offset, file.header.file_bytes)
        self._quotas = Quotas(self._capacity_bytes // 2 if quota_bytes is None else quota_bytes)
        self._filling: dict[int, _Filling] = {}
        self._published: dict[int, Block] = {}
        self.torn = False
        """True while a method changes the arena. It stays True after an interrupted change: the arena is unusable."""
        self._since_sweep = 0

    def __len__(self) -> int:
        """Return the number of blocks that are published or being filled."""
        return len(self._filling) + len(self._published)

    @property
    def used_bytes(self) -> int:
        """Total size of all blocks in bytes. Each size is rounded up to its size class."""
        return self._capacity_bytes - self._heap.free_bytes

    def allocate(self, store: Store, plan: BlockPlan, request: bytes, now_ns: int) -> Block | None:
        """Allocate a block for filling.

        Args:
            store: Store that the block calls to publish or discard itself.
            plan: Layout of the block.
            request: Encoded path of the request's path file. Empty if the block has no path file.
            now_ns: Current time of CLOCK_BOOTTIME in nanoseconds.

        Returns:
            The block, or None if there is no room.

        Raises:
            LimitExceeded: The request's quota is exceeded.
            SharedMemoryError: The block's pieces cannot be mapped, or an earlier change was interrupted.

        """
        self._since_sweep += 1
        if self._table.rung and self._since_sweep * _SWEEP_BLOCKS >= len(self._published):
            self.sweep()
        self.require_quota(request, plan.size)
        block = self._cut(self._in_one_piece, store, plan, request, now_ns)
        if block is None:
            self.sweep(unasked=True)
            block = self._cut(self._in_one_piece, store, plan, request, now_ns)
        return block or self._cut(self._in_pieces, store, plan, request, now_ns)

    def require_quota(self, request: bytes, size: int) -> None:
        """Raise LimitExceeded if the request may not use `size` more bytes."""
        self._require_whole()
        if request and not self._quotas.has_room(request, size):
            self.sweep(unasked=True)
            self._quotas.require(request, size)

    def publish(self, block: Block, digest: bytes) -> None:
        """Write the block's header, then set its state to published.

        Raises:
            SharedMemoryError: The block is no longer being filled.
            StaleReference: The block was freed while it was being filled.

        """
        if not self._is_filling(block):
            raise SharedMemoryError(f"{block.ref}: the block cannot be published after its context has ended")
        if self._table.is_released(block.entry):
            raise StaleReference(f"{block.ref}: the block was freed while it was being filled")
        block.write_header(digest)
        self._begin_change()
        self._table.publish(block.entry)
        del self._filling[block.entry]
        self._published[block.entry] = block
        self.torn = False
        self._table.ring()  # an earlier sweep ignored any release that arrived while the block was being filled

    def discard(self, block: Block) -> bool:
        """Free a block that is being filled or is published. Return False if it has been freed already."""
        is_there = self._is_filling(block) or self._published.get(block.entry) is block
        if is_there:
            self._begin_change()
            self._give_back(block)
            self.torn = False
        return is_there

    def free(self, block: Block) -> bool:
        """Free a published block. Return False if it has been freed already."""
        is_there = self._published.get(block.entry) is block
        if is_there:
            self._begin_change()
            self._give_back(block)
            self.torn = False
            self._file.stats[TAKEN_BACK] += 1
        return is_there

    def sweep(self, *, unasked: bool = False) -> int:
        """Reclaim the published blocks that a process has freed, and return their number.

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
        gone: list[Block | _Filling] = [*dropped, *freed]
        for block in gone:
            self._give_back(block)
        self.torn = False
        self._file.stats[TAKEN_BACK] += len(freed)
        return len(freed)

    def why_full(self) -> str:
        """Describe the free space, for an error message."""
        return (
            f"{self._heap.free_bytes} of {self._capacity_bytes} bytes are free, {self._heap.largest_bytes} of them in "
            f"one piece; {self._table.num_free} of {self._file.header.num_entries} entries are free"
        )

    def close(self) -> None:
        """Drop all references to blocks and to the file's mapping."""
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
                f"an exception interrupted a change to arena {self._file.path}; close the arena and create a new one"
            )

    def _cut(
        self,
        find: Callable[[BlockPlan], Pieces | None],
        store: Store,
        plan: BlockPlan,
        request: bytes,
        now_ns: int,
    ) -> Block | None:
        """Allocate a block in the pieces that `find` returns. Return None if `find` returns None."""
        self._begin_change()
        block, pieces = None, find(plan)
        if pieces is not None:
            buffer: Buffer | None
            if len(pieces) == 1:
                buffer, (base, nbytes) = self._file.mapping, pieces[0]
            else:
                buffer, base, nbytes = self._mapped(pieces), 0, sum(piece.nbytes for piece in pieces)
            assert buffer is not None
            entry, generation = self._table.take(pieces, nbytes, now_ns)
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
        except SharedMemoryError:  # too many mappings: undo the change, so that the arena is consistent
            for piece in pieces:
                self._heap.free(piece)
            self.torn = False
            raise

    def _in_one_piece(self, plan: BlockPlan) -> Pieces | None:
        """Return an extent for the whole block, or None if no extent is large enough or no entry is free."""
        extent = self._heap.allocate(plan.size) if self._table.num_free else None
        return None if extent is None else (extent,)

    def _in_pieces(self, plan: BlockPlan) -> Pieces | None:
        """Return several extents for the block, or None if the free space does not suffice."""
        return self._heap.scatter(plan.size, plan.header_bytes, min(self._table.num_free, _MAX_PIECES))

    def _give_back(self, block: Block | _Filling) -> None:
        self._filling.pop(block.entry, None)
        self._published.pop(block.entry, None)
        self._table.give_back(block.entry)
        for piece in block.pieces:
            self._heap.free(piece)
        if block.request:
            self._quotas.remove(block.request, block.nbytes)
        self._file.stats[USED] = self._capacity_bytes - self._heap.free_bytes
