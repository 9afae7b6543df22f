"""Where a block lies in its arena's file: mostly in one piece."""

from __future__ import annotations

from typing import NamedTuple

from mindie_mm.shm.format.layout import NEXT, OFFSET, SIZE, WORDS_PER_ENTRY


class Extent(NamedTuple):
    """A range of bytes."""

    offset: int
    nbytes: int


Pieces = tuple[Extent, ...]
"""In the order in which they make a block up."""


def read_pieces(entries: memoryview, num_entries: int, block: int) -> Pieces:
    """The pieces of a block, as the words of the table say (docs/wire-format.md, 2.3); they may say anything.

    Together they have the bytes that the block's own entry says, even where that leaves the first none, or less. No
    pieces if their links lead out of the table, or in a circle.
    """
    at = WORDS_PER_ENTRY * block
    offset, left, behind = entries[at + OFFSET], entries[at + SIZE], entries[at + NEXT]
    pieces: list[Extent] = []
    while behind:
        if behind > num_entries or len(pieces) == num_entries:
            return ()
        at = WORDS_PER_ENTRY * (behind - 1)
        pieces.append(Extent(entries[at + OFFSET], entries[at + SIZE]))
        left -= pieces[-1].nbytes
        behind = entries[at + NEXT]
    return (Extent(offset, left), *pieces)
