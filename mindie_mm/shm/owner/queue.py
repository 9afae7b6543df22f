"""The queue of requests that wait for room in an arena."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, MindieMMError
from mindie_mm.processes.alone import has_loop
from mindie_mm.settings.paths import absolute
from mindie_mm.shm.format.block import Block, BlockPlan
from mindie_mm.shm.format.layout import PAGE, ArenaHeader, round_up
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.owner.heap import size_class

# Interval in seconds at which the first request looks for room. Another process frees a block by writing a word to
# shared memory, which sends no notification.
POLL_S = 0.002

# Interval in seconds at which every request looks for room, even if it is not the first and no block was freed: the
# process that would have woken it may have died.
LOOK_S = 1.0


class Demand:
    """Blocks that a request needs together. It waits in the caller's thread or in an event loop."""

    # Only a request that waits changes these values. Most requests do not wait, and every request creates a Demand.
    timeout_s = 0.0
    began_s = 0.0
    """Time of `time.monotonic` at which the request joined the queue."""
    passed_bytes = 0
    """Number of bytes that later requests got while this request was the first in the queue."""
    blocks: list[Block] | None = None
    """Allocated blocks that the request has not taken yet."""
    error: MindieMMError | None = None
    """Reason why the request can get no blocks."""
    wake: Callable[[], object] = int
    """Function that lets the request look again before its pause ends. Any thread may call it."""

    def __init__(
        self, all_specs: Sequence[Mapping[str, ArraySpec]], path_file: str | Path | None, header: ArenaHeader
    ) -> None:
        """Plan a block for each of `all_specs` in the arena with this header.

        Raises:
            InputError: The specs or the path are invalid.
            LimitExceeded: A block exceeds a limit of the format, or an empty arena could not hold all blocks.

        """
        request = b"" if path_file is None else _absolute(path_file)
        plans = [BlockPlan.of(specs, request) for specs in all_specs]
        nbytes = 0
        for plan in plans[:-1]:
            nbytes += size_class(plan.size)
        for plan in plans[-1:]:  # if space is short, it can get whole pages instead of its full size class
            nbytes += round_up(plan.size, PAGE)
        if nbytes > header.capacity_bytes:
            raise LimitExceeded(
                f"the request's media take {nbytes} bytes of shared memory; the arena has only "
                f"{header.capacity_bytes} bytes (--arena-bytes)"
            )
        if len(plans) > header.num_entries:
            raise LimitExceeded(
                f"the request has {len(plans)} media items; the limit is {header.num_entries}, the number of entries "
                "of the arena"
            )
        self.plans = plans
        self.request = request
        """Encoded path of the request's path file. Empty if the blocks have no path file."""
        self.nbytes = nbytes
        """Total size of the blocks in bytes."""

    @property
    def left_s(self) -> float:
        """Number of seconds that the request may still wait."""
        return self.began_s + self.timeout_s - time.monotonic()

    @property
    def is_served(self) -> bool:
        """True if the request has received its blocks or an error."""
        return self.blocks is not None or self.error is not None

    def take(self) -> list[Block]:
        """Hand the blocks over to the caller."""
        blocks, self.blocks = self.blocks, None
        assert blocks is not None
        return blocks

    async def wait(self, look: Callable[[], float]) -> None:
        """Wait until `look` returns 0. Otherwise it returns the seconds until the next call.

        Inside `run_alone`, block the thread instead of waiting in an event loop.
        """
        if has_loop():
            await self._wait_in_loop(look)
            return
        # Not a threading.Condition: if a signal handler raises, `Condition.wait` can return without the lock.
        woken: SimpleQueue[None] = SimpleQueue()
        self.wake = partial(woken.put, None)
        while pause_s := look():
            with suppress(Empty):
                woken.get(timeout=pause_s)

    async def _wait_in_loop(self, look: Callable[[], float]) -> None:
        import asyncio  # imported late, because the tools for operators import shm and do not need it

        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        self.wake = wake
        while pause_s := look():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await woken.wait()
            woken.clear()


class Queue:
    """Requests that wait for room, in order of arrival. The lock of the arena guards the queue.

    A request gets all its blocks together, and has no blocks while it waits. Later requests may overtake the first
    request if the free memory suffices for them but not for the first request. In total, they may take at most as many
    bytes as the first request needs.
    """

    def __init__(self) -> None:
        self.line: deque[Demand] = deque()
        """Waiting requests, in order of arrival."""
        self._looked_s = 0.0
        self.has_freed = False
        """True if blocks may have been freed since the queue was served."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that requests wait for."""
        return sum(demand.nbytes for demand in self.line)

    def may_pass(self, nbytes: int) -> bool:
        """Return whether a request of `nbytes` may get its blocks before the first one."""
        return self.line[0].passed_bytes + nbytes <= self.line[0].nbytes

    def count_passed(self, nbytes: int) -> None:
        """Count the bytes of a request that has overtaken the first one."""
        self.line[0].passed_bytes += nbytes

    def join(self, demand: Demand, timeout_s: float) -> None:
        """Put a request at the end of the queue."""
        demand.began_s, demand.timeout_s = time.monotonic(), timeout_s
        self.line.append(demand)
        self.has_freed = True  # blocks may have been freed since the request's first attempt

    def leave(self, demand: Demand) -> None:
        """Remove a request from the queue, if it is still there."""
        if demand in self.line:
            self.line.remove(demand)

    def pause_s(self, demand: Demand, why_full: Callable[[], str]) -> float:
        """Return 0 if the request has its blocks, otherwise the seconds after which it should look again.

        Raises:
            ArenaFull: The request has waited too long. `why_full` describes the free space.
            MindieMMError: The request can get no blocks.

        """
        left_s = demand.left_s
        if left_s <= 0 and not demand.is_served:
            self.leave(demand)
            demand.error = ArenaFull(
                f"no room for {demand.nbytes} bytes within {demand.timeout_s:g} s: {why_full()}. Try again, or use a "
                "larger arena (--arena-bytes)"
            )
        if demand.error is not None:
            raise demand.error
        if demand.blocks is not None:
            return 0.0
        return min(left_s, POLL_S if self.line[0] is demand else LOOK_S)

    @property
    def is_due(self) -> bool:
        """True if the queue was last served more than `LOOK_S` seconds ago.

        It is then served even if no block was freed.
        """
        return time.monotonic() - self._looked_s > LOOK_S

    def serve_if_freed(self, allocate: Callable[[Demand], list[Block] | None]) -> None:
        """Serve the queue if blocks may have been freed, or if it is due."""
        if self.has_freed or self.is_due:
            self.has_freed, self._looked_s = False, time.monotonic()
            self.serve(allocate)

    def serve(self, allocate: Callable[[Demand], list[Block] | None]) -> None:
        """Give waiting requests their blocks while `allocate` finds room for them, and wake these requests."""
        first = self.line[0] if self.line else None
        while self.line and _serve_one(self.line[0], allocate):
            self.line.popleft()
        for demand in [*self.line][1:]:
            if self.may_pass(demand.nbytes):
                if not _serve_one(demand, allocate):
                    break
                if demand.error is None:
                    self.count_passed(demand.nbytes)
                self.line.remove(demand)
        if self.line and self.line[0] is not first:
            self.wake_first()  # it now has to look more often

    def wake_first(self) -> None:
        """Wake the first request, which serves the queue."""
        self.line[0].wake()

    def wake_all(self) -> None:
        """Wake all waiting requests, so that they look again."""
        for demand in tuple(self.line):
            demand.wake()


def _serve_one(demand: Demand, allocate: Callable[[Demand], list[Block] | None]) -> bool:
    """Give a request its blocks or an error. Return False if there is not enough room."""
    if not demand.is_served:
        try:
            demand.blocks = allocate(demand)
        except MindieMMError as error:
            demand.error = error
    if demand.is_served:
        demand.wake()
    return demand.is_served


def _absolute(path: str | Path) -> bytes:
    """Return the encoded absolute path. If `path` is already absolute, this is four times as fast as `absolute`."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InputError(f"path file {os.fspath(path)!r} contains a NUL character")
    return encoded if encoded.startswith(b"/") else os.fsencode(absolute(path))
