"""The owner's access to an arena's table of entries and to its release words (docs/wire-format.md, 2.3 and 2.4)."""

from __future__ import annotations

import secrets
import time
from collections import deque
from itertools import pairwise

from mindie_mm.shm.format.layout import (
    ALLOCATED_NS,
    DOORBELL,
    FILLING,
    FREE,
    NEXT,
    OFFSET,
    PAGE,
    PIECE,
    PUBLISHED,
    SIZE,
    STATE,
    WORDS_PER_ENTRY,
    ArenaHeader,
    Pieces,
    fence,
    state_word,
)
from mindie_mm.shm.format.words import MAX_GENERATION


class Table:
    """Entries and release words of an arena. Not thread-safe."""

    def __init__(self, words: memoryview, header: ArenaHeader) -> None:
        """Open the table of a new arena. `words` is the mapping of the whole file."""
        self._entries = words[PAGE : header.releases_offset].cast("Q")
        self._releases = words[header.releases_offset : header.data_offset].cast("Q")
        # Entries are reused first in, first out, so that each free entry stays unused for as long as possible.
        self._free = deque(range(header.num_entries))
        # The first generation is random, so that references to an earlier arena with the same number do not match.
        self._generations = [secrets.randbelow(MAX_GENERATION) + 1] * header.num_entries
        self._rest: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Number of unused entries."""
        return len(self._free)

    def allocate(self, pieces: Pieces, nbytes: int) -> tuple[int, int]:
        """Take an entry for a new block, and another entry for each piece after the first.

        A memory barrier makes the new state visible before any byte of the block.

        Args:
            pieces: Location of the block in the arena's file.
            nbytes: Total size of the pieces.

        Returns:
            The block's entry and its generation.

        """
        entry = self._free.popleft()
        generation = self._generations[entry]
        entries, at = self._entries, WORDS_PER_ENTRY * entry
        entries[at + STATE] = state_word(generation, FILLING)
        self._releases[1 + entry] = 0
        entries[at + OFFSET], entries[at + SIZE] = pieces[0].offset, nbytes
        entries[at + ALLOCATED_NS] = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if len(pieces) > 1:
            self._link(entry, pieces[1:])
        fence()
        return entry, generation

    def _link(self, own: int, pieces: Pieces) -> None:
        entries = self._entries
        self._rest[own] = rest = [self._free.popleft() for _ in pieces]
        for entry, (offset, nbytes) in zip(rest, pieces, strict=True):
            at = WORDS_PER_ENTRY * entry
            entries[at + STATE] = state_word(self._generations[entry], PIECE)
            entries[at + OFFSET], entries[at + SIZE] = offset, nbytes
        for entry, behind in pairwise((own, *rest)):
            entries[WORDS_PER_ENTRY * entry + NEXT] = 1 + behind

    def publish(self, entry: int) -> None:
        """Set an entry's state to published. A memory barrier makes all earlier writes visible before the new state."""
        fence()
        self._entries[WORDS_PER_ENTRY * entry + STATE] = state_word(self._generations[entry], PUBLISHED)

    def free(self, entry: int) -> None:
        """Mark the entries of a block and of its pieces as free, and advance their generations."""
        for one in (entry, *self._rest.pop(entry, ())):
            generation, at = self._generations[one], WORDS_PER_ENTRY * one
            self._entries[at + STATE] = state_word(generation, FREE)
            self._entries[at + NEXT] = 0
            self._generations[one] = generation % MAX_GENERATION + 1
            self._free.append(one)

    def is_released(self, entry: int) -> bool:
        """Return whether a process has freed the entry's block."""
        return self._releases[1 + entry] == self._generations[entry]

    @property
    def rung(self) -> bool:
        """True if the doorbell was rung after the last `answer`."""
        return self._releases[DOORBELL] != 0

    def ring(self) -> None:
        """Ring the doorbell, so that the next sweep reads the release words."""
        self._releases[DOORBELL] = 1

    def answer(self) -> None:
        """Reset the doorbell. Call this method before you read the release words."""
        self._releases[DOORBELL] = 0
        fence()

    def close(self) -> None:
        """Drop the references to the file's mapping."""
        self._entries = self._releases = memoryview(b"")
