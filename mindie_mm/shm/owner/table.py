"""The entries of an arena and its release words, as the owner writes them (docs/wire-format.md, 2.3 and 2.4)."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import pairwise

from mindie_mm.shm.format.extent import Pieces
from mindie_mm.shm.format.layout import (
    ALLOCATED_NS,
    DOORBELL,
    EXPIRES_NS,
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
    fence,
    state_word,
)
from mindie_mm.shm.format.words import MAX_GENERATION


class Table:
    """For one thread at a time."""

    def __init__(self, words: memoryview, header: ArenaHeader) -> None:
        """`words`: the arena's file."""
        self._entries = words[PAGE : header.releases_offset].cast("Q")
        self._releases = words[header.releases_offset : header.data_offset].cast("Q")
        # Oldest first: an entry rests as long as it can before it is used again.
        self._free = deque(range(header.num_entries))
        # Random, so that a reused arena number matches no old reference.
        self._generations = [secrets.randbelow(MAX_GENERATION) + 1] * header.num_entries
        self._rest: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Entries that no block has."""
        return len(self._free)

    def take(self, pieces: Pieces, nbytes: int, now_ns: int, expires_ns: int) -> tuple[int, int]:
        """(entry, generation) of a block that is filled from now on: whoever sees its bytes sees that, too.

        `nbytes` are those of all its pieces, of which each further one gets an entry of its own.
        """
        entry = self._free.popleft()
        generation = self._generations[entry]
        entries, at = self._entries, WORDS_PER_ENTRY * entry
        entries[at + STATE] = state_word(generation, FILLING)
        self._releases[1 + entry] = 0
        entries[at + OFFSET], entries[at + SIZE] = pieces[0].offset, nbytes
        entries[at + ALLOCATED_NS], entries[at + EXPIRES_NS] = now_ns, expires_ns
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
        """Lets readers in: all that was written until now is seen by whoever sees the new state."""
        fence()
        self._entries[WORDS_PER_ENTRY * entry + STATE] = state_word(self._generations[entry], PUBLISHED)

    def give_back(self, entry: int) -> None:
        """Ends the use of a block's entry, and of its pieces'."""
        for one in (entry, *self._rest.pop(entry, ())):
            generation, at = self._generations[one], WORDS_PER_ENTRY * one
            self._entries[at + STATE] = state_word(generation, FREE)
            self._entries[at + NEXT] = 0
            self._generations[one] = generation % MAX_GENERATION + 1
            self._free.append(one)

    def is_released(self, entry: int) -> bool:
        """Whether anybody freed the entry's block."""
        return self._releases[1 + entry] == self._generations[entry]

    def is_expired(self, entry: int, now_ns: int) -> bool:
        """Whether the block has a lease, and it ran out."""
        return 0 < self._entries[WORDS_PER_ENTRY * entry + EXPIRES_NS] < now_ns

    def release(self, entry: int) -> None:
        """Frees the entry's block as others do."""
        self._releases[1 + entry] = self._generations[entry]

    @property
    def rung(self) -> bool:
        """Whether a block was freed since `answer`."""
        return self._releases[DOORBELL] != 0

    def ring(self) -> None:
        """Says that a block may have been freed."""
        self._releases[DOORBELL] = 1

    def answer(self) -> None:
        """Takes the bell's word back; to be called before the release words are looked at."""
        self._releases[DOORBELL] = 0
        fence()

    def close(self) -> None:
        """Lets go of the file."""
        self._entries = self._releases = memoryview(b"")
