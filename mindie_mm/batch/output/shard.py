"""Writes and reads shards. A shard consists of a table of rows and a file of blocks.

A shard is complete as soon as its table has its final name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.input.record import RecordsDigest
from mindie_mm.batch.input.request import REQUEST
from mindie_mm.batch.input.source import NOT_JSON, Chunk
from mindie_mm.errors import ArenaFull, CorruptReference, SegmentMissing, SharedMemoryError, StorageError
from mindie_mm.msgspec_errors import in_words
from mindie_mm.processes import faults
from mindie_mm.shm import ArraySpec, DiskArena
from mindie_mm.shm.disk_writer import WriteBatchMemory
from mindie_mm.shm.format.layout import DISK_PAGE, ArenaHeader
from mindie_mm.shm.format.words import MAX_ARENA
from mindie_mm.tokenize.prompt import MediaSpan, Prompt, put_words

MAX_ROW_BYTES = 1 << 34
"""Maximum number of bytes that the last row may add beyond the size at which a shard ends."""
MAX_BLOCKS = 2048
"""Maximum number of media items of a shard. If a shard has more than half of this number, the next row goes into a new
shard."""

_SPAN = pa.struct(
    [
        ("kind", pa.string()),
        *((name, pa.int64()) for name in ("start", "stop", "token", "lead", "tail", "second_token")),
    ]
)
_ARRAY = pa.struct([("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64()))])
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("spans", pa.list_(_SPAN)),
        pa.field("digests", pa.list_(pa.binary())),
        pa.field("arrays", pa.list_(pa.list_(_ARRAY))),
        pa.field("error", pa.string()),
    ]
)
"""Columns of a table. `input_ids` contain handle words. `spans`, `digests` and `arrays` have one entry per media item.
A digest covers the content of an item."""

_COLUMNS, _SPAN_NAMES = tuple(SCHEMA.names), tuple(_SPAN.names)
_INFO = b"mindie_mm"


class ShardInfo(msgspec.Struct, frozen=True):
    """Description of a shard. It is stored in the metadata of the shard's table."""

    run: str
    """`Run.digest` of the run."""
    first_row: int
    num_rows: int
    num_errors: int
    num_tokens: int
    num_items: int
    num_bytes: int
    """Size of the blocks in bytes, rounded up to whole pages."""
    arena_digest: str
    """`DiskArena.digest` of the file of blocks."""
    records_digest: str = ""
    """`RecordsDigest` of the input's rows. Empty if an older release wrote the shard."""

    @property
    def stop_row(self) -> int:
        """Number of the row after the shard's last row."""
        return self.first_row + self.num_rows


def table_path(folder: Path, first_row: int) -> Path:
    """Return the path of the table of the shard that begins with `first_row`."""
    return folder / f"shard-{first_row:09d}.parquet"


def arena_path(folder: Path, first_row: int) -> Path:
    """Return the path of the file of blocks of the shard that begins with `first_row`."""
    return folder / f"shard-{first_row:09d}.arena"


def read_info(path: Path) -> ShardInfo:
    """Return the description in a shard's table. Raise CorruptReference if the file is not the table of a shard."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
        return msgspec.json.decode(metadata[_INFO], type=ShardInfo)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise CorruptReference(f"{path} is not the table of a shard: {error}") from error
    except NOT_JSON as error:
        raise CorruptReference(f"{path} is not the table of a shard: {in_words(error)}") from error


def complete_shards(folder: Path, chunk: Chunk, run: str) -> list[ShardInfo] | None:
    """Return the shards of a chunk of the run with the digest `run`, or None if the chunk is incomplete."""
    shards: list[ShardInfo] = []
    row = chunk.first_row
    while row < chunk.stop_row and (path := table_path(folder, row)).is_file():
        try:
            shards.append(read_info(path))
        except CorruptReference:
            return None  # the shard is written again, as if it were missing
        if shards[-1].run != run:
            return None  # a node's disk may still contain shards of another run
        if not _has_blocks(arena_path(folder, row), shards[-1].num_bytes):
            return None
        row = shards[-1].stop_row
    return shards if row == chunk.stop_row else None


def _has_blocks(path: Path, num_bytes: int) -> bool:
    """Return whether `path` is a complete file of blocks with `num_bytes` bytes. The blocks are not read."""
    try:
        with path.open("rb") as file:
            header = ArenaHeader.read(file.fileno(), os.fstat(file.fileno()), DISK_PAGE)
            return header.capacity_bytes == num_bytes
    except (OSError, SegmentMissing):
        return False


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A row that was read from a shard's table."""

    row: int
    """Number of the row in the whole input."""
    id: str
    prompt: Prompt | None
    """Prompt of the row, or None if the row has an error."""
    error: str | None
    digests: Sequence[bytes]
    arrays: Sequence[Sequence[Mapping[str, Any]]]
    columns: Mapping[str, Any]
    """Values of the columns that the run kept, by name."""
    request: str | None
    """What the row states about its answer, as in `request_of`."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Convert a record of a table to a row. Raise CorruptReference if no run could have written this record."""
        error, ids, spans = record["error"], record["input_ids"], record["spans"]
        prompt = None
        if error is None:
            if ids is None or spans is None:
                raise CorruptReference(f"row {record['row']} has neither token ids nor an error")
            prompt = Prompt(np.asarray(ids, np.int64), tuple(MediaSpan(**span) for span in spans))
            bounds = [0, *(bound for span in prompt.spans for bound in (span.start, span.stop)), len(prompt)]
            if any(start > stop for start, stop in pairwise(bounds)):
                raise CorruptReference(
                    f"row {record['row']}: the bounds {bounds[1:-1]} of its media items do not fit its token ids"
                )
        columns = {name: value for name, value in record.items() if name not in _COLUMNS}
        request = columns.pop(REQUEST, None)
        digests, arrays = record["digests"] or (), record["arrays"] or ()
        return cls(record["row"], record["id"], prompt, error, digests, arrays, columns, request)

    def plain_prompt(self) -> Prompt:
        """Return the prompt with placeholder ids in place of handle words."""
        assert self.prompt is not None
        return Prompt(self.prompt.plain_ids, self.prompt.spans)

    def mounted_prompt(self, arena: int) -> Prompt:
        """Return the prompt with handle words that refer to arena number `arena`.

        Raises:
            CorruptReference: The handle words in the table are damaged.

        """
        assert self.prompt is not None
        refs = [replace(ref, arena=arena) for ref in self.prompt.refs()]
        words = [(ref.name_word,) if ref.shape is None else ref.to_words() for ref in refs]
        return put_words(self.plain_prompt(), words)


def read_table(path: Path, num_rows: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of a shard, with all columns or only `columns`. Raise CorruptReference if it is damaged."""
    try:
        with pq.ParquetFile(path) as file:  # takes half the time of `pq.read_table`
            schema, table = file.schema_arrow, file.read(columns)
    except (OSError, pa.ArrowException) as error:
        raise CorruptReference(f"{path} cannot be read: {error}") from error
    if not pa.schema([*schema][: len(SCHEMA)]).equals(SCHEMA) or table.num_rows != num_rows:
        raise CorruptReference(
            f"{path} was changed after the run: it does not have the columns of a shard, or does not have "
            f"{num_rows} rows"
        )
    return table


class ShardWriter:
    """A shard that is being written. Use the writer as a context manager. On exit, an unfinished shard is removed."""

    def __init__(
        self,
        folder: Path,
        run: str,
        number: int,
        first_row: int,
        shard_bytes: int,
        memory: WriteBatchMemory | None = None,
        columns: Mapping[str, pa.DataType] = MappingProxyType({}),
    ) -> None:
        """Create the files of a shard.

        Args:
            folder: Folder to write to.
            run: Digest of the run.
            number: Number of the arena in handle words. The number may be used again, because each table has a file of
                blocks of its own.
            first_row: Number of the first row.
            shard_bytes: Total size of the blocks in bytes at which the shard is full.
            memory: Buffers that successive shards can share.
            columns: Further columns of the table, with their types.

        """
        self._table_path = table_path(folder, first_row)
        self._schema = pa.schema([*SCHEMA, *columns.items()])
        self._run = run
        self._first_row = first_row
        self._shard_bytes = shard_bytes
        self._records: list[dict[str, Any]] = []
        self._num_items = 0
        self.records = RecordsDigest()
        """Digest of the records that the rows were converted from."""
        path = arena_path(folder, first_row)
        self.arena = DiskArena.create(path, number % (MAX_ARENA + 1), shard_bytes + MAX_ROW_BYTES, MAX_BLOCKS, memory)
        """Arena for the blocks of the rows."""

    @property
    def is_full(self) -> bool:
        """Whether the next row must go into another shard."""
        return self.arena.used_bytes >= self._shard_bytes or self.arena.num_free < MAX_BLOCKS // 2

    @property
    def num_rows(self) -> int:
        return len(self._records)

    def add(
        self,
        row_id: str | None,
        prompt: Prompt,
        items: Sequence[tuple[bytes, Mapping[str, ArraySpec]]],
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a row whose blocks have been written.

        Args:
            row_id: Id of the row. If it is None, the number of the row is its id.
            prompt: Prompt of the row, with handle words.
            items: Digest and array specs of each media item.
            columns: Values of further columns of the table.

        """
        self._num_items += len(items)
        self._append(
            row_id,
            input_ids=prompt.ids,
            spans=[{name: getattr(span, name) for name in _SPAN_NAMES} for span in prompt.spans],
            digests=[digest for digest, _ in items],
            arrays=[
                [{"name": name, "dtype": spec.dtype, "shape": spec.shape} for name, spec in specs.items()]
                for _, specs in items
            ],
            **columns,
        )

    def add_error(self, row_id: str | None, error: str, columns: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add a row that failed."""
        self._append(row_id, error=error, **columns)

    def _append(self, row_id: str | None, **columns: Any) -> None:
        row = self._first_row + len(self._records)
        record = dict.fromkeys(self._schema.names) | {"row": row, "id": str(row) if row_id is None else row_id}
        self._records.append(record | columns)

    def finish(self) -> ShardInfo:
        """Complete and sync both files, and rename them to their final names. The table is renamed last.

        Raises:
            StorageError: A file cannot be written.

        """
        with replacing(self._table_path) as unfinished:
            try:
                self.arena.flush()  # a thread writes the last blocks while the table is being built
                with pq.ParquetWriter(unfinished, self._schema, compression="zstd") as writer:
                    writer.write_table(self._table())
                    self.arena.close()
                    info = self._info()
                    writer.add_key_value_metadata({_INFO: msgspec.json.encode(info)})
            except (ArenaFull, SharedMemoryError) as error:
                raise StorageError(str(error)) from error
            faults.point(f"named {self.arena.path.name}")
        return info

    def _table(self) -> pa.Table:
        columns = {name: [record[name] for record in self._records] for name in self._schema.names}
        ids = _lists(columns.pop("input_ids"))
        return pa.table(
            [pa.array(columns[field.name], field.type) if field.name in columns else ids for field in self._schema],
            self._schema,
        )

    def _info(self) -> ShardInfo:
        return ShardInfo(
            run=self._run,
            first_row=self._first_row,
            num_rows=len(self._records),
            num_errors=sum(record["error"] is not None for record in self._records),
            num_tokens=sum(len(record["input_ids"]) for record in self._records if record["error"] is None),
            num_items=self._num_items,
            num_bytes=self.arena.used_bytes,
            arena_digest=self.arena.digest,
            records_digest=self.records.hex(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.abandon()


def _lists(rows: Sequence[NDArray[np.int64] | None]) -> pa.ListArray:
    """Return a column of arrays and nulls. Converting Python objects would take twenty times as long."""
    starts = list(accumulate((0 if row is None else len(row) for row in rows), initial=0))
    values = np.concatenate([np.empty(0, np.int64), *(row for row in rows if row is not None)])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values, mask=pa.array([row is None for row in rows]))
