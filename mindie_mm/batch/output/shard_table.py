"""The table of a shard in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindie_mm.batch.input.remote import RemoteFile
from mindie_mm.batch.output.array_file import file_bytes
from mindie_mm.batch.output.row_arrays import specs_of
from mindie_mm.batch.output.shard import ShardInfo, arrays_path, records_of
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.errors import CorruptReference
from mindie_mm.shm import ArraySpec

if TYPE_CHECKING:
    import pyarrow as pa

_ROW_BYTES = 4096
"""Approximate size in bytes of the Python objects of a row."""

Specs = Sequence[Mapping[str, ArraySpec]]
"""Shapes and types of the arrays of each media item of a row, by name."""


class ShardTable:
    """The rows of a shard, without their arrays.

    All rows are converted together. A row that is converted after its arrays were copied takes twice as long, because
    the copy displaces Python's code and objects from the processor's caches.
    """

    def __init__(self, table: pa.Table, folder: Path | RemoteFile, info: ShardInfo) -> None:
        """Convert the rows of `table`, which describes the shard `info` of the run in `folder`."""
        self.arrays_path: Path | RemoteFile = arrays_path(folder, info.first_row)
        self.num_bytes: int = table.nbytes + _ROW_BYTES * table.num_rows
        """Approximate size in bytes."""
        self._size = file_bytes(info.num_bytes)
        self._first_row = info.first_row
        self._rows = [*map(self._converted, records_of(table))]

    def row(self, number: int) -> ShardRow:
        """Return a copy of the row `number` of the run. Raise CorruptReference if the row is damaged."""
        found = self._rows[number - self._first_row]
        if isinstance(found, CorruptReference):
            raise CorruptReference(str(found))
        row = copy(found[0])
        row.input_ids = None if row.input_ids is None else row.input_ids.copy()
        if row.columns or row.assistant_spans:
            row.columns, row.assistant_spans = deepcopy((row.columns, row.assistant_spans))
        return row

    def specs(self, number: int) -> Specs:
        """Return the specs of the row `number`. Raise CorruptReference if the row or an array of it is damaged."""
        found = self._rows[number - self._first_row]
        if isinstance(found, CorruptReference):
            raise CorruptReference(str(found))
        row, specs = found
        return specs_of(row, self.arrays_path, self._size) if specs is None else specs

    def _converted(self, record: dict[str, Any]) -> tuple[ShardRow, Specs | None] | CorruptReference:
        try:
            row = ShardRow.of(record)
        except CorruptReference as error:
            return error.with_traceback(None)
        try:
            return row, specs_of(row, self.arrays_path, self._size)
        except CorruptReference:
            return row, None
