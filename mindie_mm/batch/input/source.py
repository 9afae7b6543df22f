"""Files of rows, divided into chunks that any process can read independently."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from mindie_mm.batch.input.file_state import DIGESTED_BYTES, FileState, digest_of
from mindie_mm.batch.input.record import Files, Record
from mindie_mm.batch.input.remote import RemoteFile
from mindie_mm.batch.input.sniff import are_tables, no_lines, packing
from mindie_mm.batch.input.tar import key_of, members, row_starts
from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.media.endings import ending_of
from mindie_mm.settings.config import MAX_SOURCE_BYTES

MEDIA_MARK = "{media}"
"""Placeholder for the media in a prompt template."""
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)
"""Exceptions that msgspec raises if bytes are not JSON, or are JSON of another type."""
_PIECE_BYTES = 1 << 16
_RESTORE = "Restore the file, or give another output folder for its new content"
_MOST_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 20


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive rows of one file, which a worker processes together. A chunk is repeated if its worker dies."""

    number: int
    file: int
    """Index of the source."""
    first_row: int
    """Number of the chunk's first row in the whole input."""
    num_rows: int
    start: int
    """Start of the chunk in its file: an offset in bytes, or a row of a table."""
    stop: int

    @property
    def stop_row(self) -> int:
        """Number of the row after the chunk's last row."""
        return self.first_row + self.num_rows


class Source(ABC):
    """A file of rows."""

    def __init__(
        self,
        path: Path | RemoteFile,
        columns: Sequence[str] = (),
        name: str = "",
        state: FileState | None = None,
        digest: str = "",
    ) -> None:
        """Create a source.

        Args:
            path: File to read.
            columns: Columns to read. If empty, all columns are read.
            name: Name of the file in messages. The default is its path.
            state: State that the file must have. The default is its current state.
            digest: Fingerprint of the file in this state, if known.

        Raises:
            InputError: The file cannot be read.

        """
        self.path = path
        self.columns = columns
        self.name = name or str(path)
        self.digest = digest
        if state is None:
            with _reading(path):
                state = self._state()
        self.state = state

    @property
    def size(self) -> int:
        """Size of the file in bytes, or in rows for a table. This is the `stop` of the last chunk."""
        return self.state.size

    @property
    def is_digested_whole(self) -> bool:
        """True if the fingerprint covers every byte of the file."""
        return bool(self.state.version) or self.state.size <= DIGESTED_BYTES

    def fingerprint(self) -> str:
        """Return a digest of the whole file, or of the size and 1,024 pieces of a large file.

        The digest of a remote file is that of its size and its ETag or version.

        Raises:
            InputError: The file cannot be read.
            StorageError: The file has changed.

        """
        if self.state.version:
            self.require_unchanged()
            digest = blake3(f"{self.state.size} {self.state.version}".encode()).hexdigest(16)
        else:
            with _reading(self.path), self.opened() as file:
                digest = digest_of(file)
        self.digest = digest
        return digest

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file. Check on entry and on exit that the file is in the state that this source records.

        Raises:
            OSError: The file cannot be opened.
            StorageError: The file has been changed or replaced.

        """
        with self.path.open("rb") as file:
            self._require_state(file)
            file.seek(0)
            yield file
            self._require_state(file)

    def require_unchanged(self) -> None:
        """Raise StorageError if the file has been changed or removed since the run began."""
        try:
            with self.opened():
                pass
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{self.name} was removed while the run was reading it. {_RESTORE}") from None
        except OSError as error:
            raise StorageError(f"{self.name} cannot be read to the end: {error.strerror}") from error

    def _state(self) -> FileState:
        if isinstance(self.path, RemoteFile):
            return self.path.state()
        with self.path.open("rb") as file:
            return FileState.of(file.fileno())

    def _require_state(self, file: BinaryIO) -> None:
        now = self.path.state() if isinstance(self.path, RemoteFile) else FileState.of(file.fileno())
        if now == self.state:
            return
        if not (self.digest and now.may_equal(self.state) and digest_of(file) == self.digest):
            difference = self.state.difference(now)
            raise StorageError(f"{self.name} changed while the run was reading it: {difference}. {_RESTORE}")
        self.state = now

    def close(self) -> None:
        """Close the file between two chunks. The next chunk opens it again."""

    def check(self) -> None:
        """Raise InputError if the file is damaged in a way that would otherwise stop the run halfway."""

    @abstractmethod
    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Divide the file into chunks of `num_rows` rows, and yield the number of rows, start and stop of each chunk.

        The last chunk may have fewer rows.
        """

    @abstractmethod
    def records(self, start: int, stop: int) -> Iterator[Record]:
        """Yield the records of a chunk without checking their content."""

    def texts(self) -> Iterator[bytes]:
        """Yield the JSON text of each row that has one. Raise InputError if the file cannot be read."""
        yield from ()


def _reading(path: Path | RemoteFile) -> AbstractContextManager[None]:
    return os_errors_as(InputError, f"{path} cannot be read")


def _chosen(text: bytes, columns: Sequence[str]) -> bytes:
    """Return a JSON object with only the keys in `columns`. Return any other text unchanged."""
    if not columns:
        return text
    try:
        values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (*NOT_JSON, RecursionError):
        return text
    return msgspec.json.encode({name: value for name, value in values.items() if name in columns})


def _without_mark(line: bytes) -> bytes:
    """Return a line without its byte order mark. Any line may begin with a mark, because files may be concatenated."""
    return line.removeprefix(BOM_UTF8)


class JSONLines(Source):
    """A file with one row per line. Blank lines and byte order marks are ignored."""

    def check(self) -> None:
        with _reading(self.path), self.opened() as file:
            head = file.read(_BYTES_AT_ONCE)
        if content := no_lines(head):
            raise InputError(f"{self.name} is not JSON lines: it is {content}")

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        with self.opened() as file:
            rows = 0
            start = stop = file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
            for line in file:
                stop += len(line)
                rows += not _without_mark(line).isspace()
                if rows == num_rows:
                    yield rows, start, stop
                    rows, start = 0, stop
            if rows:
                yield rows, start, stop

    def records(self, start: int, stop: int) -> Iterator[bytes]:
        with self.opened() as file:
            file.seek(start)
            while start < stop:
                line = file.readline()
                if not line:  # the file was truncated after its rows were counted
                    return
                start += len(line)
                if not (row := _without_mark(line)).isspace():
                    yield _chosen(row, self.columns)

    def texts(self) -> Iterator[bytes]:
        with _reading(self.path), self.opened() as file:
            yield from map(_without_mark, file)


class Table(Source):
    """A Parquet file."""

    def __init__(
        self,
        path: Path | RemoteFile,
        columns: Sequence[str] = (),
        name: str = "",
        state: FileState | None = None,
        digest: str = "",
    ) -> None:
        import pyarrow as pa  # imported late, because the parent process of the workers may not need it

        super().__init__(path, columns, name, state, digest)
        try:
            with self._parquet() as file:
                self._metadata, self.schema = file.metadata, file.schema_arrow
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from None
        names = self.schema.names
        if missing := set(columns) - set(names):
            raise InputError(f"{path} has no columns named {sorted(missing)}; its columns are {names}")
        if twice := [name for name, count in Counter(names).items() if count > 1 and (not columns or name in columns)]:
            raise InputError(f"{path} has several columns named {twice[0]!r}; rename them, or drop all but one")
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        self._group_starts = list(accumulate((group.num_rows for group in groups[:-1]), initial=0))
        row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        self._rows_at_once = max(1, min(_MOST_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(1, row_bytes)))
        self._at = 0
        self._rows: Iterator[dict[str, Any]] = iter(())

    @property
    def size(self) -> int:
        return int(self._metadata.num_rows)

    def check(self) -> None:
        with _reading(self.path), self.opened() as file:
            if are_tables(file, self._metadata):
                raise InputError(
                    f"{self.path} contains several concatenated Parquet files. Split the file, and give each part "
                    "separately"
                )

    def has_only(self, numbers: range, column: str) -> bool:
        """Return whether all integers of a column are among `numbers`, as far as the statistics of the file tell."""
        for group in map(self._metadata.row_group, range(self._metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}."):
                    found = chunk.statistics
                    if found is None or (found.num_values and not found.has_min_max):
                        return False
                    if found.has_min_max and not (found.min in numbers and found.max in numbers):
                        return False
        return True

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        for start in range(0, self.size, num_rows):
            stop = min(start + num_rows, self.size)
            yield stop - start, start, stop

    def records(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        # Within a row group, continue after the worker's last chunk. A new reader would decode all rows before `start`.
        first = self._group_starts[bisect_right(self._group_starts, start) - 1]
        if not first < self._at <= start:
            self._at, self._rows = first, self._read(self._group_starts.index(first))
        for row in islice(self._rows, stop - self._at):
            self._at += 1
            if self._at > start:
                yield row

    def close(self) -> None:
        self._at, self._rows = 0, iter(())

    def _parquet(self, **options: Any) -> Any:
        """Open the file as Parquet. pyarrow reopens the descriptor that was checked, instead of the path."""
        import pyarrow.parquet as pq

        with self.opened() as file:
            if not isinstance(self.path, RemoteFile):
                return pq.ParquetFile(f"/proc/self/fd/{file.fileno()}", **options)
        return pq.ParquetFile(self.path.open(), **options)

    def _read(self, first_group: int) -> Iterator[dict[str, Any]]:
        groups = list(range(first_group, self._metadata.num_row_groups))
        # The file is read in pieces, because a row group with images may not fit into memory.
        pieces = {"buffer_size": _PIECE_BYTES, "pre_buffer": False}
        with self._parquet(metadata=self._metadata, **pieces) as file:
            for batch in file.iter_batches(self._rows_at_once, row_groups=groups, columns=[*self.columns] or None):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError):
                    names = batch.schema.names
                    rows = [{name: _cell(name, row.column(name)[0]) for name in names} for row in _single(batch)]
                yield from rows


def _single(batch: Any) -> Iterator[Any]:
    return (batch.slice(row, 1) for row in range(batch.num_rows))


def _cell(name: str, scalar: Any) -> Any:
    """Return the value of a cell. If Python cannot represent the value, such as text that is not UTF-8, return b"".

    In an id, text that is not UTF-8 is escaped instead, so that the row keeps its id.
    """
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        if name == "id" and isinstance(error, UnicodeDecodeError):
            return error.object.decode(errors="backslashreplace")
        return b""


class Tar(Source):
    """A tar in WebDataset format. Consecutive files whose names are equal up to the first dot form a row."""

    _starts: Sequence[int] = ()
    """Offset in bytes of each row, followed by the end of the last row. Empty until `check` has run."""

    def check(self) -> None:
        with _reading(self.path), self.opened() as file:
            self._starts = row_starts(file, self.name)

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        if not self._starts:
            self.check()
        starts = self._starts
        for first in range(0, len(starts) - 1, num_rows):
            stop = min(first + num_rows, len(starts) - 1)
            yield stop - first, starts[first], starts[stop]

    def records(self, start: int, stop: int) -> Iterator[Files]:
        key, files, repeated = "", dict[str, bytes](), None
        with self.opened() as file:
            for member in members(file, self.name, start):
                if member.offset >= stop:
                    break
                if (name := key_of(member.name)) != key:
                    if files:
                        yield Files(key, files, repeated)
                    key, files, repeated = name, {}, None
                file.seek(member.offset_data)
                data = file.read(min(member.size, MAX_SOURCE_BYTES + 1))  # a row with a larger file fails
                repeated = member.name if member.name in files else repeated
                files[member.name] = _chosen(data, self.columns) if ending_of(member.name) == ".json" else data
        if files:
            yield Files(key, files, repeated)

    def texts(self) -> Iterator[bytes]:
        with _reading(self.path), self.opened() as file:
            for member in members(file, self.name):
                if member.name.removeprefix(key_of(member.name)).lower() == ".json":
                    file.seek(member.offset_data)
                    yield file.read(min(member.size, MAX_SOURCE_BYTES))


def open_source(
    path: Path | RemoteFile,
    columns: Sequence[str],
    name: str = "",
    state: FileState | None = None,
    digest: str = "",
) -> Source:
    """Open a file of rows. Its extension determines the format. The arguments have the same meaning as in `Source`.

    Raises:
        InputError: The file does not exist, cannot be read, or has an unknown extension.
        StorageError: The file is not in the given state.

    """
    with _reading(path):
        try:
            is_file = path.state() is not None if isinstance(path, RemoteFile) else stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_file = False
    if not is_file:
        raise InputError(f"there is no file {path}")
    ending = ending_of(path.name)
    if ending in (".jsonl", ".ndjson"):
        return JSONLines(path, columns, name, state, digest)
    if ending in (".parquet", ".pq"):
        return Table(path, columns, name, state, digest)
    if ending == ".tar":
        return Tar(path, columns, name, state, digest)
    raise InputError(
        f"{path} is neither a folder of media nor a .jsonl, .ndjson, .json, .parquet, .pq or .tar file, nor JSON "
        f"lines, JSON or a tar that is compressed as .gz or .zst{_but(path)}"
    )


def _but(path: Path | RemoteFile) -> str:
    """Return text about the format that the file's content shows, for the error about an unknown extension."""
    with _reading(path), path.open("rb") as file:
        packed_as = packing(file.read(_PIECE_BYTES))
    return f". It is {packed_as}" if packed_as else ""


def chunks(sources: Sequence[Source], num_rows: int, limit: int | None) -> Iterator[Chunk]:
    """Yield chunks of `num_rows` rows, up to `limit` rows in total. No chunk spans two files.

    Raises:
        InputError: A file cannot be read.

    """
    number = first_row = 0
    for index, source in enumerate(sources):
        with _reading(source.path):
            for rows, start, stop in source.cut(num_rows):
                taken = rows if limit is None else min(rows, limit - first_row)
                if taken <= 0:
                    return
                yield Chunk(number, index, first_row, taken, start, stop)
                number, first_row = number + 1, first_row + taken
