"""A row of a shard, as it is stored in the shard's table and journal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

import msgspec
import numpy as np

from mindie_mm.batch.input.request import REQUEST
from mindie_mm.batch.output.disk_writer import StoredArray
from mindie_mm.errors import CorruptReference
from mindie_mm.msgspec_errors import in_words
from mindie_mm.tokenize.prompt import MediaSpan, Prompt


class ShardRow(msgspec.Struct, eq=False):
    """A row of a shard. The fields after `id` and before `error` are None if the row has an error."""

    row: int
    """Number of the row in the whole input."""
    id: str
    input_ids: np.ndarray[Any, Any] | None = None
    """Token ids, int64 [T], with placeholder ids at the positions of features."""
    spans: tuple[MediaSpan, ...] | None = None
    """Positions of each media item in `input_ids`."""
    digests: tuple[bytes, ...] | None = None
    """Digest of the content of each media item."""
    arrays: tuple[list[StoredArray], ...] | None = None
    """Arrays of each media item."""
    assistant_spans: tuple[tuple[int, int], ...] | None = None
    """Ranges of the assistant's turns in `input_ids`. Tables have them only in runs with `Settings.assistant_spans`."""
    error: str | None = None
    records_digest: str = ""
    """Digest of the shard's records up to this row. Only journals contain it."""
    columns: Mapping[str, Any] = {}
    """Values of the columns that the run kept, by name. Journals do not contain them."""
    request: str | None = None
    """The row's fields that concern its answer, as `request_of` returns them. Tables have a column for them."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Convert a record of a table to a row. Raise CorruptReference if no run could have written this record."""
        try:
            spans = record["spans"] and [[span[name] for name in SPAN_NAMES] for span in record["spans"]]
            own = {name: record[name] for name in _COLUMNS} | {"spans": spans}
            row = msgspec.convert(own, cls, dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            raise CorruptReference(f"row {record['row']} is damaged: {in_words(error)}") from None
        row.columns = {name: value for name, value in record.items() if name not in _OWN_COLUMNS}
        row.request = record.get(REQUEST)
        row.assistant_spans = record.get(ASSISTANT)
        if row.error is not None:
            return row
        if row.input_ids is None or row.spans is None or row.digests is None or row.arrays is None:
            raise CorruptReference(f"row {row.row} has neither token ids nor an error")
        bounds = [0, *(bound for span in row.spans for bound in (span.start, span.stop)), len(row.input_ids)]
        if any(start > stop for start, stop in pairwise(bounds)):
            raise CorruptReference(
                f"row {row.row}: the bounds {bounds[1:-1]} of its media items do not fit its token ids"
            )
        if not len(row.spans) == len(row.digests) == len(row.arrays):
            raise CorruptReference(
                f"row {row.row} has {len(row.spans)} media items, but {len(row.digests)} digests and the arrays of "
                f"{len(row.arrays)} items"
            )
        return row

    @property
    def prompt(self) -> Prompt:
        """Prompt of a row without an error. It has no handle words."""
        assert self.input_ids is not None
        return Prompt(self.input_ids, self.spans or ())

    def to_record(self) -> dict[str, Any]:
        """Return the values of the table's columns, except `input_ids`."""
        return {
            "row": self.row,
            "id": self.id,
            "spans": self.spans and [*map(msgspec.structs.asdict, self.spans)],
            "digests": self.digests,
            "arrays": self.arrays and [[*map(msgspec.structs.asdict, arrays)] for arrays in self.arrays],
            "error": self.error,
            ASSISTANT: self.assistant_spans,
            **self.columns,
        }


ASSISTANT = "assistant_spans"
"""Column with the ranges of the assistant's turns."""
SPAN_NAMES = MediaSpan.__struct_fields__
_COLUMNS = ("row", "id", "input_ids", "spans", "digests", "arrays", "error")
_OWN_COLUMNS = frozenset((*_COLUMNS, REQUEST, ASSISTANT))


def encode_hook(value: Any) -> Any:
    """Convert token ids for msgspec."""
    return value.tolist()


def decode_hook(kind: Any, value: Any) -> Any:
    """Convert a list to token ids for msgspec."""
    return np.asarray(value, np.int64)
