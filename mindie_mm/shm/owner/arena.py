"""The owner's side: one file in /dev/shm, reserved whole, out of which blocks are cut."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Self

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded
from mindie_mm.settings.paths import absolute
from mindie_mm.shm.format.block_header import BlockPlan, check_digest
from mindie_mm.shm.format.layout import PAGE, round_up
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.stats import FULL, WAITED_NS, WAITING, WAITS
from mindie_mm.shm.memory.block import Block
from mindie_mm.shm.owner.arena_file import ArenaFile
from mindie_mm.shm.owner.heap import size_class
from mindie_mm.shm.owner.inventory import Inventory
from mindie_mm.shm.owner.waiting import WaitingLine
from mindie_mm.shm.reader.mapped import drop_removed
from mindie_mm.shm.requests.path_file import record

DEFAULT_TIMEOUT_S = 10.0

_MAX_LEASE_S = 10**9


class Arena:
    """An arena of this process: a context manager, and safe to use from many threads of it.

    One writer, many readers: only the owner changes the state of a block; others ask by a release word. A forked
    child owns nothing: there `allocate` fails, and `close` leaves the file alone. What nobody closes is removed when
    it is dropped, or when the process ends well. If an exception of a signal handler interrupts a change of the arena,
    the arena is `lost`.
    """

    def __init__(self, file: ArenaFile, inventory: Inventory) -> None:
        """For `create`."""
        self.number = file.header.arena
        """0 to 65,535: the file `mindie_mm-<4 hex digits>`."""
        self.path = file.path
        self.capacity_bytes = file.header.capacity_bytes
        """Bytes for blocks, in whole pages."""
        self._file = file
        self._inventory = inventory
        self.renew_lock()
        _arenas.add(self)

    @classmethod
    def create(cls, capacity_bytes: int, *, quota_bytes: int | None = None) -> Arena:
        """Makes an arena: complete and locked when its name appears, nothing at all if the process dies before.

        `quota_bytes`: most that the blocks of one path file may take together; None: half the capacity. InputError
        for less than a byte, SharedMemoryError if /dev/shm has no room for it.
        """
        if quota_bytes is not None and quota_bytes < 1:
            raise InputError(f"a quota of {quota_bytes} bytes for a request; it takes at least 1")
        file = ArenaFile.create(capacity_bytes)
        return cls(file, Inventory(file, quota_bytes))

    @property
    def populated(self) -> Event:
        """Set once every page is faulted in, which goes on in the background, or it is closed."""
        return self._file.populated

    @property
    def lost(self) -> bool:
        """Whether no block can be allocated any more, so that the arena has to be closed and another one made.

        It is closed, or another program removed, cut or overwrote its file: readers find nothing there, and writing
        where the file was cut would end this process. Or an exception interrupted a change of the arena: published
        blocks can still be read until it is closed.
        """
        with self._mutex:
            return self._is_lost()

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that nobody freed, by size class."""
        self.sweep()
        return self._inventory.used_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks being filled or published."""
        self.sweep()
        return len(self._inventory)

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
            block = None if self._line.tickets else self._take(plan, request, lease_ns)
            if block is None:
                self._file.require_held()
                self._inventory.require_quota(request, plan.size)
                self._file.stats[WAITS] += 1
        if block is None:
            block = self._line.wait(partial(self._take, plan, request, lease_ns), timeout_s)
        if block is None:
            with self._mutex:
                self._file.require_held()
                self._file.stats[FULL] += 1
                why = self._inventory.why_full()
            raise ArenaFull(f"no room for a block of {plan.size} bytes within {timeout_s} s: {why}")
        if path_file is not None:
            self._record([block], request)
        return block

    def try_allocate(
        self, all_specs: Sequence[Mapping[str, ArraySpec]], *, path_file: str | Path
    ) -> list[Block] | None:
        """Return one block for each of `all_specs`, or None if there is no room for all of them at this moment.

        Blocks are as those of `allocate`. A request that gets None holds nothing.

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
            self._inventory.sweep()
            if total > self.capacity_bytes - self._inventory.used_bytes:
                return None
            try:
                for plan in plans:
                    block = self._take(plan, request, 0)
                    if block is None:
                        break
                    blocks.append(block)
            finally:
                if len(blocks) < len(plans):
                    for block in blocks:
                        self._inventory.discard(block)
        if len(blocks) < len(plans):
            return None
        self._record(blocks, request)
        return blocks

    def require(self, all_specs: Sequence[Mapping[str, ArraySpec]], path_file: str | Path) -> int:
        """Return how many bytes the blocks of `all_specs` take together.

        Raises:
            LimitExceeded: The arena or the request's quota could never hold them together.

        """
        request = _absolute(path_file)
        return self._require([BlockPlan.of(specs, request) for specs in all_specs], request)

    def count_waiting(self, waiting_bytes: int) -> None:
        """Publish the number of bytes that requests wait for, for `/metrics`."""
        with self._mutex:
            if self._file.held:
                self._file.stats[WAITING] = waiting_bytes

    def count_wait(self, seconds: float, *, in_vain: bool) -> None:
        """Count a request that has waited for room, and whether it waited in vain."""
        with self._mutex:
            if self._file.held:
                self._file.stats[WAITS] += 1
                self._file.stats[FULL] += in_vain
                self._file.stats[WAITED_NS] += int(seconds * 1e9)

    def why_full(self) -> str:
        """Return what is free, in words for an error."""
        with self._mutex:
            self._file.require_held()
            return self._inventory.why_full()

    def publish(self, block: Block, digest: bytes | None) -> None:
        """For `Block.publish`."""
        if digest is not None:
            check_digest(digest)
        with self._mutex:
            self._file.require_held()
            self._inventory.publish(block, digest or b"")

    def discard(self, block: Block) -> None:
        """For `Block`: gives back a block whose `publish` did not return. Nothing if the arena is `lost`."""
        with self._mutex:
            if not self._is_lost() and self._inventory.discard(block):
                self._line.wake()

    def free(self, block: Block) -> None:
        """Takes back a published block of this arena at once; nothing if somebody did, or if the arena is `lost`.

        As `free` of its reference, for which a process maps the arena a second time, to read it.
        """
        with self._mutex:
            if not self._is_lost() and self._inventory.free(block):
                self._line.wake()

    def sweep(self) -> int:
        """Takes back the published blocks that any process freed; their number."""
        with self._mutex:
            freed = self._inventory.sweep() if self._file.held and not self._inventory.torn else 0
            if freed:
                self._line.wake()
            return freed

    def close(self) -> None:
        """Removes the arena: readers that map it keep their pages. Idempotent; a forked child only lets go."""
        with self._mutex:
            self._file.close()
            self._inventory.close()
            self._line.wake()
        drop_removed()  # blocks that were freed or read in this process were so through a mapping of their own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew_lock(self) -> None:
        """For a forked child: whichever thread held the lock, or waited, is not there to go on."""
        self._mutex = Lock()
        self._line = WaitingLine(self._mutex)

    def _is_lost(self) -> bool:
        """Under the lock, outside of which a change may be going on."""
        return self._inventory.torn or self._file.lost

    def _require(self, plans: Sequence[BlockPlan], request: bytes) -> int:
        sizes = [plan.size for plan in plans]
        # The last block may get less than its size class, where there is no more.
        others = sum(map(size_class, sizes[:-1]))
        total = others + sum(round_up(size, PAGE) for size in sizes[-1:])
        if total > self.capacity_bytes:
            raise LimitExceeded(
                f"the request's media take {total} bytes of shared memory; the arena has {self.capacity_bytes} "
                "(--arena-bytes)"
            )
        if len(plans) > (num_entries := self._file.header.num_entries):
            raise LimitExceeded(f"the request has {len(plans)} media items; the arena has {num_entries} entries")
        with self._mutex:
            self._inventory.require_quota(request, others + sum(sizes[-1:]))
        return total

    def _record(self, blocks: Sequence[Block], request: bytes) -> None:
        """Record the blocks of a request in its path file, or give all of them back."""
        try:
            for block in blocks:
                block.write_header(b"")
                record(request, self.number, block.entry, block.generation)
        except BaseException:
            for block in blocks:
                self.discard(block)
            raise

    def _take(self, plan: BlockPlan, request: bytes, lease_ns: int) -> Block | None:
        """Under the lock. SharedMemoryError if it is not held, or lost."""
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._file.require_found(now_ns)
        return self._inventory.allocate(self, plan, request, lease_ns, now_ns)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _renew_locks() -> None:
    for arena in _arenas:
        arena.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _absolute(path: str | Path) -> bytes:
    """Return an absolute path. For an absolute input this is four times as fast as `paths.absolute`."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InputError(f"path file {os.fspath(path)!r} has a NUL in it")
    return encoded if encoded.startswith(b"/") else os.fsencode(absolute(path))


def _lease_ns(lease_s: float, path_file: str | Path | None) -> int:
    if path_file is not None:
        raise InputError(f"a lease of {lease_s} s for a block of {path_file}: its request says how long it lives")
    if not 0 <= lease_s <= _MAX_LEASE_S:
        raise InputError(f"a lease of {lease_s} s; it must be 0 to {_MAX_LEASE_S}")
    return max(1, int(lease_s * 1e9))
