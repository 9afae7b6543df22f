"""Location of a block in its arena's file. Most blocks have a single piece."""

from __future__ import annotations

from typing import NamedTuple

from mindie_mm.shm.format.layout import NEXT, OFFSET, SIZE, WORDS_PER_ENTRY


class Extent(NamedTuple):
    """Range of bytes in a file."""

    offset: int
    nbytes: int


Pieces = tuple[Extent, ...]
"""Extents of a block. Concatenated in this order, they form the block."""


def read_pieces(entries: memoryview, num_entries: int, block: int) -> Pieces:
    """Read the pieces of a block from the arena's table (docs/wire-format.md, 2.3).

    The table is not trusted, because its words can have any values. The size of the first piece is the size in the
    block's own entry minus the sizes of all other pieces. In a damaged table, this size can be 0 or negative.

    Returns:
        The pieces, or an empty tuple if a link points outside the table or the links form a cycle.

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
