"""The shuffled order of a run's rows, which any number of ranks and workers can resume in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice, repeat
from random import Random

from mindie_mm.errors import InputError

_TOGETHER = 8
"""Number of shards whose rows are shuffled together. A dataset keeps as many files of arrays mapped."""


class Order:
    """The rows that one rank reads, as a sampler of torch's `DataLoader`. `Dataset.order` creates it."""

    def __init__(
        self,
        shards: Sequence[range],
        failed: Collection[int],
        key: tuple[int, int],
        consumed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        """Store the parts of the order.

        Args:
            shards: Rows of each shard.
            failed: Rows that are left out.
            key: Seed and epoch.
            consumed: Number of samples that all ranks together have consumed in this epoch.
            rank: Number of this rank, from 0.
            num_ranks: Number of ranks.

        Raises:
            InputError: A number is out of its range.

        """
        self._shards, self._failed, self._key = shards, failed, key
        self._num_rows = sum(map(len, shards)) - len(failed)
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank={rank} must be at least 0 and less than num_ranks={num_ranks}")
        if not 0 <= consumed <= self._num_rows:
            raise InputError(f"consumed={consumed} must be from 0 to {self._num_rows}, the number of samples")
        self._consumed, self._rank, self._num_ranks = consumed, rank, num_ranks

    def __len__(self) -> int:
        return math.ceil((self._num_rows - self._consumed) / self._num_ranks)

    def __iter__(self) -> Iterator[int]:
        missing = len(self) * self._num_ranks - (self._num_rows - self._consumed)
        # Rows from the beginning of the order fill up the last turn, so that all ranks have as many samples.
        again = chain.from_iterable(self._rows() for _ in repeat(None))
        rows = chain(islice(self._rows(), self._consumed, None), islice(again, missing))
        return islice(rows, self._rank, None, self._num_ranks)

    def _rows(self) -> Iterator[int]:
        """Yield the rows of the whole epoch. At most the rows of eight shards are in memory."""
        shards = [*range(len(self._shards))]
        Random(f"{self._key}").shuffle(shards)  # noqa: S311 - an order is no secret
        for start in range(0, len(shards), _TOGETHER):
            own = [row for shard in shards[start : start + _TOGETHER] for row in self._shards[shard]]
            Random(f"{self._key} {start}").shuffle(own)  # noqa: S311 - as above
            yield from (row for row in own if row not in self._failed)
