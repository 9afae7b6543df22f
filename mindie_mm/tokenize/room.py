"""Allocation of memory in an arena for all media of a request together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.errors import ArenaFull, MindieMMError
from mindie_mm.shm import Arena, ArraySpec, Block

_POLL_S = 0.002
"""Interval in seconds between two checks while requests wait. Other processes free a block by writing a word to shared
memory, which does not send a notification."""

_LOOK_S = 1.0
"""Interval in seconds at which the queue is checked even if no block was freed, because a process may have died."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A waiting request."""

    all_specs: Sequence[Mapping[str, ArraySpec]]
    path_file: Path
    nbytes: int
    blocks: asyncio.Future[list[Block]]
    passed_bytes: int = 0
    """Number of bytes that later requests got while this request was the first in the queue."""

    @property
    def has_blocks(self) -> bool:
        """Whether blocks were allocated for the request. Its caller may not have taken them yet."""
        return self.blocks.done() and self.blocks.exception() is None


class Room:
    """The queue of requests that need memory in an arena.

    A request gets the blocks for all its items together. Requests wait in order of arrival, and have no blocks while
    they wait.

    Later requests may overtake the first request in the queue if the free memory suffices for them but not for the
    first request. In total, they may take at most as many bytes as the first request needs.
    """

    def __init__(self, arena: Arena, wait_s: float, *, is_own: bool = False) -> None:
        """Create the queue of `arena`.

        Args:
            arena: Arena in which blocks are allocated.
            wait_s: Maximum time in seconds that a request waits.
            is_own: Whether `close` closes the arena.

        """
        self.arena = arena
        self._wait_s = wait_s
        self._is_own = is_own
        self._line: deque[_Waiter] = deque()
        self._serving: asyncio.Task[None] | None = None

    def try_take(self, all_specs: Sequence[Mapping[str, ArraySpec]], path_file: Path) -> list[Block] | None:
        """Return a block for each item in `all_specs`, or None if the request has to wait.

        Raises:
            LimitExceeded: The arena or the request's quota could never hold these blocks together.
            SharedMemoryError: The arena is closed or lost.

        """
        nbytes = self.arena.require(all_specs, path_file)
        if self._line and not self._may_pass(nbytes):
            return None
        blocks = self.arena.try_allocate(all_specs, path_file=path_file)
        if blocks is not None and self._line:
            self._line[0].passed_bytes += nbytes
        return blocks

    async def take(self, all_specs: Sequence[Mapping[str, ArraySpec]], path_file: Path) -> list[Block]:
        """Wait for the request's turn and for enough memory. Return a block for each item in `all_specs`.

        Raises:
            ArenaFull: The arena had too little free memory within the maximum time.
            LimitExceeded, SharedMemoryError: See `try_take`.

        """
        nbytes = self.arena.require(all_specs, path_file)
        began_s, in_vain = time.monotonic(), False
        waiter = _Waiter(all_specs, path_file, nbytes, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._count()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait([waiter.blocks], timeout=self._wait_s)
            if not waiter.blocks.done():
                self._serve_all()  # memory may have been freed since the last check
            if waiter.blocks.done():
                return waiter.blocks.result()
            in_vain = True
            why = self.arena.why_full()
            raise ArenaFull(
                f"no room for {nbytes} bytes of media within {self._wait_s:g} s: {why}. Try again, or start the "
                "service with a larger --arena-bytes"
            )
        except asyncio.CancelledError:
            if waiter.has_blocks:
                for block in waiter.blocks.result():
                    self.arena.discard(block)
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
                self._serve_all()  # there may be enough memory for the next request
            self.arena.count_wait(time.monotonic() - began_s, in_vain=in_vain)
            self._count()

    def close(self) -> None:
        """Stop serving the queue, and close the arena if `is_own` is set. This may be called repeatedly."""
        if self._serving is not None:
            self._serving.cancel()
        if self._is_own:
            self.arena.close()

    def _may_pass(self, nbytes: int) -> bool:
        first = self._line[0]
        return first.passed_bytes + nbytes <= first.nbytes

    def _count(self) -> None:
        self.arena.count_waiting(sum(waiter.nbytes for waiter in self._line))

    async def _serve(self) -> None:
        """Serve the queue until it is empty."""
        used_bytes, looked_s = -1, 0.0
        while self._line:
            now_s, used = time.monotonic(), self.arena.used_bytes
            if used < used_bytes or used_bytes < 0 or now_s - looked_s > _LOOK_S:
                self._serve_all()
                looked_s, used = now_s, self.arena.used_bytes
            used_bytes = used
            await asyncio.sleep(_POLL_S)

    def _serve_all(self) -> None:
        """Allocate blocks for waiting requests, in order of arrival, while memory suffices."""
        while self._line and self._serve_one(self._line[0]):
            self._line.popleft()
        for waiter in [*self._line][1:]:
            if self._may_pass(waiter.nbytes):
                if not self._serve_one(waiter):
                    return
                if waiter.has_blocks:  # a request that failed does not use memory
                    self._line[0].passed_bytes += waiter.nbytes
                self._line.remove(waiter)

    def _serve_one(self, waiter: _Waiter) -> bool:
        """Set the blocks of `waiter`, or its error. Return False if the free memory does not suffice."""
        if waiter.blocks.done():
            return True
        try:
            blocks = self.arena.try_allocate(waiter.all_specs, path_file=waiter.path_file)
        except MindieMMError as error:
            waiter.blocks.set_exception(error)
            return True
        if blocks is None:
            return False
        waiter.blocks.set_result(blocks)
        return True
