"""A finished run as a sequence of samples, for a trainer or whoever looks."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindie_mm.batch.manifest import Manifest, Shard
from mindie_mm.batch.shard import ShardInfo, ShardRow, arena_path, read_table, table_path
from mindie_mm.shm.mapped import MappedArena
from mindie_mm.shm.reader import View
from mindie_mm.tokenize.prompt import MediaSpan

_OPEN_ARENAS = 8
_TABLE_BYTES = 128 << 20
"""Bytes of tables that are kept: to read one takes far longer than to take a row out of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row."""

    row: int
    id: str
    ids: NDArray[np.int64] | None
    """int64 [T], every slot that takes a feature holding its placeholder; None where there is an error."""
    spans: Sequence[MediaSpan]
    """The slots of each media item."""
    arrays: Sequence[Mapping[str, NDArray[Any]]]
    """Each media item's arrays, by name: read-only, over the file's own pages."""
    error: str | None = None
    """Why there are no ids."""


class Dataset(Sequence[Sample]):
    """The rows of the run in a folder, in the order of its input. Can be handed to processes."""

    def __init__(self, folder: str | Path) -> None:
        """InputError where there is no finished run."""
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self._firsts = [shard.info.first_row for shard in self.manifest.shards]
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._arenas: OrderedDict[int, MappedArena] = OrderedDict()
        self._table_bytes = 0

    def __len__(self) -> int:
        return self.manifest.num_rows

    @overload
    def __getitem__(self, row: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, row: slice) -> list[Sample]: ...

    def __getitem__(self, row: SupportsIndex | slice) -> Sample | list[Sample]:
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
        info = self.shard(number).info
        return ShardRow.of(self._table(info).slice(number - info.first_row, 1).to_pylist()[0])

    def shard(self, number: int) -> Shard:
        """The shard that a row is in."""
        return self.manifest.shards[bisect_right(self._firsts, number) - 1]

    def views(self, record: ShardRow) -> list[View]:
        """The blocks of a row's media items. CorruptReference, SegmentMissing."""
        assert record.prompt is not None
        arena = self._arena(self.shard(record.row).info.first_row)
        return [View(arena, ref) for ref in record.prompt.refs()]

    def _sample(self, number: int) -> Sample:
        record = self.record(number)
        if record.prompt is None:
            return Sample(number, record.id, None, (), (), record.error)
        prompt = record.prompt
        arrays = [{name: view[name] for name in view} for view in self.views(record)]
        return Sample(number, record.id, prompt.plain_ids, prompt.spans, arrays)

    def _table(self, info: ShardInfo) -> pa.Table:
        if info.first_row not in self._tables:
            table = read_table(table_path(self.folder, info.first_row), info.num_rows)
            self._table_bytes += table.nbytes
            while self._tables and self._table_bytes > _TABLE_BYTES:
                self._table_bytes -= self._tables.popitem(last=False)[1].nbytes
            self._tables[info.first_row] = table
        self._tables.move_to_end(info.first_row)
        return self._tables[info.first_row]

    def _arena(self, first_row: int) -> MappedArena:
        if first_row not in self._arenas:
            self._arenas[first_row] = MappedArena(arena_path(self.folder, first_row))
            if len(self._arenas) > _OPEN_ARENAS:
                self._arenas.popitem(last=False)
        self._arenas.move_to_end(first_row)
        return self._arenas[first_row]

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open: a process that gets it opens its own."""
        return {**self.__dict__, "_tables": OrderedDict(), "_arenas": OrderedDict(), "_table_bytes": 0}
