"""What an arena's owner counts, in words of the header page: seen by every process, also when no service answers."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Self

from mindie_mm.errors import SegmentMissing

STATS_OFFSET = 512
"""Place of the words in the arena's first page."""

POPULATED, USED, PEAK, ALLOCATIONS, WAITS, FULL, TAKEN_BACK, WAITING, WAITED_NS = range(9)
"""Places of the words; one a field of `ArenaStats`."""

_WORDS = struct.Struct("<9Q")
STATS_BYTES = _WORDS.size


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Read while the owner goes on counting: each number is right, two need not be of one moment."""

    populated_bytes: int
    """Bytes of the arena's file, from its start, that are faulted in."""
    used_bytes: int
    """Bytes in blocks, as the owner saw it last: a freed block counts until it is taken back."""
    peak_bytes: int
    """The most that `used_bytes` ever was."""
    allocations: int
    """Blocks that were ever allocated."""
    waits: int
    """Requests, or allocations of a script, that had to wait for room."""
    full: int
    """Those of them that waited in vain: ArenaFull."""
    taken_back: int
    """Published blocks that were freed and taken back."""
    waiting_bytes: int
    """Bytes that requests wait for at this moment."""
    waited_ns: int
    """Time that requests have waited for room, in nanoseconds, over all of them."""

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """The numbers of the arena behind an open file; SegmentMissing if it was cut short."""
        words = os.pread(descriptor, STATS_BYTES, STATS_OFFSET)
        if len(words) < STATS_BYTES:
            raise SegmentMissing(f"the arena's file ends before byte {STATS_OFFSET + STATS_BYTES}, where its counts do")
        return cls(*_WORDS.unpack(words))
