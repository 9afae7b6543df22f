"""Counters that an arena's owner keeps in the header page. Any process can read them, even if the service hangs."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Self

from mindie_mm.errors import SegmentMissing

STATS_OFFSET = 512
"""Offset of the counters in the arena's first page, in bytes."""

POPULATED, USED, PEAK, ALLOCATIONS, WAITS, FULL, TAKEN_BACK, WAITING, WAITED_NS = range(9)
"""Indices of the counters, in the order of the fields of `ArenaStats`."""

_WORDS = struct.Struct("<9Q")
STATS_BYTES = _WORDS.size


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Counters of an arena.

    The owner can change the counters while they are being read. Each value is exact, but two values can be from
    different moments.
    """

    populated_bytes: int
    """Number of bytes at the start of the arena's file whose pages have been faulted in."""
    used_bytes: int
    """Bytes in blocks that the owner has not reclaimed. A freed block counts until the owner reclaims it."""
    peak_bytes: int
    """Largest value of `used_bytes` so far."""
    allocations: int
    """Number of blocks allocated so far."""
    waits: int
    """Number of requests, and of direct calls to `Arena.allocate`, that had to wait for room."""
    full: int
    """Number of waits that ended with ArenaFull, because no room became free."""
    taken_back: int
    """Number of published blocks that were freed and reclaimed."""
    waiting_bytes: int
    """Number of bytes that requests are waiting for at the moment."""
    waited_ns: int
    """Total time that requests have waited for room, in nanoseconds."""

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read the counters of an arena from its open file.

        Raises:
            SegmentMissing: The file is truncated.

        """
        words = os.pread(descriptor, STATS_BYTES, STATS_OFFSET)
        if len(words) < STATS_BYTES:
            raise SegmentMissing(f"the arena's file is too short: its counts end at byte {STATS_OFFSET + STATS_BYTES}")
        return cls(*_WORDS.unpack(words))
