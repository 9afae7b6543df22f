"""A finished run as a sequence of samples, for a trainer or whoever looks."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindie_mm.batch.manifest import Manifest, Shard
from mindie_mm.batch.shard import ShardRow, arena_path, read_table, table_path
from mindie_mm.shm.mapped import MappedArena
from mindie_mm.shm.reader import View
from mindie_mm.tokenize.prompt import Span

_OPEN_SHARDS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One row."""

    row: int
    id: str
    ids: NDArray[np.int64] | None
    """int64 [T], every slot that takes a feature holding its placeholder; None where there is an error."""
    spans: Sequence[Span]
    """The slots of each media item."""
    arrays: Sequence[Mapping[str, NDArray[Any]]]
    """Of each media item, by name: read-only, over the file's own pages."""
    error: str | None = None
    """Why there are no ids."""


class Dataset(Sequence[Sample]):
    """The rows of the run in a folder, in the order of its input. Can be handed to processes."""

    def __init__(self, folder: str | Path) -> None:
        """InputError where there is no finished run."""
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self._firsts = [shard.info.first_row for shard in self.manifest.shards]
        self._open: OrderedDict[int, tuple[pa.Table, MappedArena]] = OrderedDict()

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __getitem__(self, row: Any) -> Any:
        """The row of that number, counted from the end if negative; of a slice, a list.

        IndexError; where files were lost or changed since they were written, CorruptReference or SegmentMissing.
        """
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        number = index(row)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._sample(number)

    def __iter__(self) -> Iterator[Sample]:
        for row in range(len(self)):
            yield self._sample(row)

    def record(self, number: int) -> ShardRow:
        """The row as its table has it, words in its ids."""
        table, _, at = self._shard(number)
        return ShardRow.of(table.slice(at, 1).to_pylist()[0])

    def shard(self, number: int) -> Shard:
        """The shard that a row is in."""
        return self.manifest.shards[bisect_right(self._firsts, number) - 1]

    def views(self, record: ShardRow) -> list[View]:
        """The blocks of a row's media items. CorruptReference, SegmentMissing."""
        _, arena, _ = self._shard(record.row)
        return [View(arena, ref) for ref in record.refs()]

    def _sample(self, number: int) -> Sample:
        record = self.record(number)
        if record.prompt is None:
            return Sample(number, record.id, None, (), (), record.error)
        prompt = record.prompt
        arrays = [{name: view[name] for name in view} for view in self.views(record)]
        return Sample(number, record.id, prompt.plain_ids, prompt.spans, arrays)

    def _shard(self, number: int) -> tuple[pa.Table, MappedArena, int]:
        first = self.shard(number).info.first_row
        if first not in self._open:
            table = read_table(table_path(self.folder, first), self.shard(number).info.num_rows)
            self._open[first] = (table, MappedArena(arena_path(self.folder, first)))
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(first)
        table, arena = self._open[first]
        return table, arena, number - first

    def __getstate__(self) -> dict[str, Any]:
        """Without the files that are open: a process that gets it opens its own."""
        return {**self.__dict__, "_open": OrderedDict()}
