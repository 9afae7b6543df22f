"""Writes and reads shards. A shard consists of a Parquet table of rows and a safetensors file of their arrays.

A shard is complete as soon as its table has its final name. Until then, it has a journal of its finished rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.input.record import Record, RecordsDigest
from mindie_mm.batch.input.remote import AnyPath, RemoteFile
from mindie_mm.batch.input.source import NOT_JSON, Chunk
from mindie_mm.batch.output.array_file import ArrayFile, file_bytes
from mindie_mm.batch.output.disk_writer import StoredArray, WriteBatchMemory
from mindie_mm.batch.output.journal import Journal
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.output.shard_row import SPAN_NAMES, ShardRow
from mindie_mm.errors import CorruptReference, InputError
from mindie_mm.msgspec_errors import in_words
from mindie_mm.processes import faults
from mindie_mm.tokenize.prompt import Prompt

_SPAN = pa.struct(
    [
        ("kind", pa.string()),
        *((name, pa.int64()) for name in SPAN_NAMES if name != "kind"),
    ]
)
_ARRAY = pa.struct(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("digest", pa.binary()),
    ]
)
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
"""Columns of a table. `input_ids` contain placeholder ids at the positions of features. `spans`, `digests` and `arrays`
have one entry per media item. The digest of an item identifies its content; the digest of an array is the XXH3-128 of
its bytes. The offset of an array is counted from the start of the file of arrays."""

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
    """Size of the arrays and their padding in bytes."""
    max_row_bytes: int
    """Largest size of the arrays of a row in bytes."""
    arrays_digest: str
    """Digest of the file of arrays."""
    records_digest: str
    """`RecordsDigest` of the input's rows."""

    @property
    def stop_row(self) -> int:
        """Number of the row after the shard's last row."""
        return self.first_row + self.num_rows

    def require_records(self, records: Iterator[Record], source: str, folder: str) -> None:
        """Read the shard's rows from `records`. Raise InputError if they differ from the rows that the shard has.

        `source` is the name of the input, and `folder` is the name of the run's folder.
        """
        digest = RecordsDigest()
        for record in islice(records, self.num_rows):
            digest.add(record)
        if digest.hex() != self.records_digest:
            raise InputError(
                f"{source} has changed since an earlier call: rows {self.first_row} to {self.stop_row - 1} differ from "
                f"the rows in {folder}. Restore the file, or choose another folder for --output"
            )


def table_path(folder: AnyPath, first_row: int) -> AnyPath:
    """Return the path of the table of the shard that begins with `first_row`."""
    return cast("AnyPath", folder / f"shard-{first_row:09d}.parquet")


def arrays_path(folder: AnyPath, first_row: int) -> AnyPath:
    """Return the path of the array file of the shard that begins with `first_row`."""
    return cast("AnyPath", folder / f"shard-{first_row:09d}.safetensors")


def read_info(path: Path) -> ShardInfo:
    """Return the description in a shard's table. Raise CorruptReference if the file is not the table of a shard."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise CorruptReference(f"{path} is not the table of a shard: {error}") from error
    return info_in(metadata, path)


def info_in(metadata: Mapping[bytes, bytes] | None, path: Path | RemoteFile) -> ShardInfo:
    """Return the description in the metadata of the table `path`. Raise CorruptReference if there is none."""
    try:
        return msgspec.json.decode((metadata or {})[_INFO], type=ShardInfo)
    except KeyError as error:
        raise CorruptReference(f"{path} is not the table of a shard: {error}") from error
    except NOT_JSON as error:
        raise CorruptReference(f"{path} is not the table of a shard: {in_words(error)}") from error


def finished_shard(folder: Path, first_row: int, run: str) -> ShardInfo | None:
    """Return the shard that begins with `first_row`, or None if the run `run` has not finished it. Arrays are not read.

    A shard with a damaged table is written again, as if it were missing. A node's disk may still contain shards of
    another run.
    """
    path = table_path(folder, first_row)
    try:
        info = read_info(path) if path.is_file() else None
        if info is None or info.run != run:
            return None
        read_table(path, info.num_rows, checks_pages=True)
        size = arrays_path(folder, first_row).stat().st_size
    except (CorruptReference, OSError):
        return None
    return info if size == file_bytes(info.num_bytes) else None


def complete_shards(folder: Path, chunk: Chunk, run: str) -> list[ShardInfo] | None:
    """Return the shards of a chunk of the run with the digest `run`, or None if the chunk is incomplete."""
    shards: list[ShardInfo] = []
    row = chunk.first_row
    while row < chunk.stop_row:
        if (info := finished_shard(folder, row, run)) is None:
            return None
        shards.append(info)
        row = info.stop_row
    return shards if row == chunk.stop_row else None


def read_table(
    path: Path | RemoteFile,
    num_rows: int,
    columns: Sequence[str] | None = None,
    content: bytes | None = None,
    *,
    checks_pages: bool = False,
) -> pa.Table:
    """Return the table of a shard, with all columns or only `columns`. Raise CorruptReference if it is damaged.

    The file is not read if its `content` is given. `checks_pages` compares the checksums of the table's pages, which
    takes time. A finished run does not need this, because its manifest has the digest of each table.
    """
    try:
        source = path if content is None else pa.BufferReader(content)
        with pq.ParquetFile(
            source, page_checksum_verification=checks_pages
        ) as file:  # takes half the time of `pq.read_table`
            schema, table = file.schema_arrow, file.read(columns)
    except (OSError, pa.ArrowException) as error:
        raise CorruptReference(f"{path} cannot be read: {error}") from error
    if not pa.schema([*schema][: len(SCHEMA)]).equals(SCHEMA) or table.num_rows != num_rows:
        raise CorruptReference(
            f"{path} was changed after the run: it does not have the columns of a shard, or does not have "
            f"{num_rows} rows"
        )
    return table


def records_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a shard's table as `ShardRow.of` reads them. Token ids are read-only views, int64 [T]."""
    records: list[dict[str, Any]] = table.drop_columns("input_ids").to_pylist()
    for record, ids in zip(records, table["input_ids"], strict=True):
        # Converting 3,000 ids to Python objects would take 0.1 ms.
        record["input_ids"] = None if ids.values is None else ids.values.to_numpy()
    return records


def counts_of(rows: Sequence[ShardRow]) -> dict[str, int]:
    """Return the fields of `ShardInfo` that depend only on the rows of the shard."""
    items = [row.arrays or () for row in rows]
    return {
        "num_rows": len(rows),
        "num_errors": sum(row.error is not None for row in rows),
        "num_tokens": sum(len(row.input_ids) for row in rows if row.input_ids is not None),
        "num_items": sum(map(len, items)),
        "max_row_bytes": max(sum(array.length for arrays in row for array in arrays) for row in items),
    }


class ShardWriter:
    """A shard that is being written. Use the writer as a context manager.

    If the context exits before `finish`, the journal keeps the rows whose arrays have been written.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        first_row: int,
        shard_bytes: int,
        memory: WriteBatchMemory,
        columns: Mapping[str, pa.DataType] = MappingProxyType({}),
        destination: RunFolder | None = None,
    ) -> None:
        """Open the files of a shard.

        Args:
            folder: Folder to write to.
            run: Digest of the run.
            first_row: Number of the first row.
            shard_bytes: Total size of the arrays in bytes at which the shard is full.
            memory: Buffers that successive shards can share.
            columns: Further columns of the table, with their types.
            destination: Folder of the run, which may be in a store. The default is the local `folder`.

        Raises:
            StorageError: A file cannot be opened, or another process is writing the shard.

        """
        self._table_path = table_path(folder, first_row)
        self._destination = destination or RunFolder(folder)
        self._schema = pa.schema([*SCHEMA, *columns.items()])
        self._run = run
        self._first_row = first_row
        self._shard_bytes = shard_bytes
        self._rows: list[ShardRow] = []
        self.records = RecordsDigest()
        """Digest of the records that the rows were converted from."""
        self._journal = Journal(self._table_path.with_suffix(".journal"), run, first_row)
        try:
            self.file = ArrayFile(arrays_path(folder, first_row), self._journal, memory)
            """File for the arrays of the rows."""
        except BaseException:
            self._journal.close()
            raise

    @property
    def is_full(self) -> bool:
        """True if the next row must go into another shard."""
        return self.file.used_bytes >= self._shard_bytes or self.file.is_half_full

    @property
    def next_row(self) -> int:
        """Number of the row that is added next."""
        return self._first_row + len(self._rows)

    def keep(self, columns: Mapping[str, Any]) -> ShardRow | None:
        """Add the next row if an earlier call has written it from the same records. Otherwise return None.

        After the first row that cannot be kept, the later rows of the earlier call are dropped. `columns` has the
        values of further columns of the table.
        """
        if not self._journal.kept:
            return None
        kept, _ = self._journal.kept[0]
        if kept.records_digest != self.records.hex() or not self.file.keep(kept):
            self._journal.kept.clear()
            return None
        kept.columns = columns
        self._rows.append(self._journal.take())
        return kept

    def add(
        self,
        row_id: str | None,
        prompt: Prompt,
        items: Sequence[tuple[bytes, list[StoredArray]]],
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a row whose arrays have been written to `file`.

        Args:
            row_id: Id of the row. If it is None, the number of the row is its id.
            prompt: Prompt of the row, without handle words.
            items: Digest and arrays of each media item.
            columns: Values of further columns of the table.

        """
        self._append(
            ShardRow(
                row=self.next_row,
                id=self._id(row_id),
                input_ids=prompt.ids,
                spans=prompt.spans,
                digests=tuple(digest for digest, _ in items),
                arrays=tuple(arrays for _, arrays in items),
                assistant_spans=prompt.assistant,
                columns=columns,
            )
        )

    def add_error(self, row_id: str | None, error: str, columns: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add a row that failed."""
        self._append(ShardRow(row=self.next_row, id=self._id(row_id), error=error, columns=columns))

    def _id(self, row_id: str | None) -> str:
        return str(self.next_row) if row_id is None else row_id

    def _append(self, row: ShardRow) -> None:
        row.records_digest = self.records.hex()
        self._rows.append(row)
        self.file.end_row(row)

    def finish(self) -> ShardInfo:
        """Complete and sync both files, and give the table its final name. If the run is in a store, upload them first.

        Raises:
            StorageError: A file cannot be written.

        """
        with replacing(self._table_path) as unfinished:
            digest = self.file.finish()
            faults.point(f"finished {self.file.path.name}")
            info = self._info(digest)
            with pq.ParquetWriter(unfinished, self._schema, compression="zstd", write_page_checksum=True) as writer:
                writer.write_table(self._table())
                writer.add_key_value_metadata({_INFO: msgspec.json.encode(info)})
            self._destination.put_shard(self.file.path, unfinished, self._table_path.name)
        self._destination.free(self.file.path)
        self._journal.remove()
        return info

    def _table(self) -> pa.Table:
        records = [row.to_record() for row in self._rows]
        columns = {field.name: field.type for field in self._schema if field.name != "input_ids"}
        arrays = {name: pa.array([record.get(name) for record in records], kind) for name, kind in columns.items()} | {
            "input_ids": _lists([row.input_ids for row in self._rows])
        }
        return pa.table([arrays[name] for name in self._schema.names], self._schema)

    def _info(self, digest: str) -> ShardInfo:
        return ShardInfo(
            run=self._run,
            first_row=self._first_row,
            num_bytes=self.file.used_bytes,
            arrays_digest=digest,
            records_digest=self.records.hex(),
            **counts_of(self._rows),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self._journal.close()


def _lists(rows: Sequence[NDArray[np.int64] | None]) -> pa.ListArray:
    """Return a column of arrays and nulls. Converting Python objects would take twenty times as long."""
    starts = list(accumulate((0 if row is None else len(row) for row in rows), initial=0))
    values = np.concatenate([np.empty(0, np.int64), *(row for row in rows if row is not None)])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values, mask=pa.array([row is None for row in rows]))
