"""Finds ids that several rows of a run share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RepeatedIds:
    """Rows that have the id of an earlier row."""

    num_rows: int
    """Number of rows that repeat an earlier id."""
    examples: Sequence[tuple[int, int]]
    """Up to three pairs of rows that have the same id. Each pair is the first row with this id, and a later row."""

    @classmethod
    def of(cls, ids: Iterable[Sequence[str]]) -> RepeatedIds:
        """Find repeated ids. `ids` yields the ids of consecutive rows.

        Memory use is 16 bytes per row: a 64-bit hash of each id, and a sorted copy.
        """
        parts = [np.fromiter(map(_hash, some), np.uint64, len(some)) for some in ids]
        hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        ordered = np.sort(hashes)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeated):
            return cls(0, ())
        first_rows: dict[int, int] = {}
        examples: list[tuple[int, int]] = []
        for row in np.flatnonzero(np.isin(hashes, repeated)).tolist():
            first = first_rows.setdefault(int(hashes[row]), row)
            if first != row:
                examples.append((first, row))
                if len(examples) == _MOST_SHOWN:
                    break
        return cls(len(repeated), tuple(examples))


def _hash(row_id: str) -> int:
    return int(xxh3_64_intdigest(row_id.encode()))
