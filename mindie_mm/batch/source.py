"""Files of rows, cut into chunks that any process can read by itself."""

from __future__ import annotations

import os
import tarfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path, PurePath
from typing import Any

import msgspec
from blake3 import blake3

from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind

MEDIA_MARK = "{media}"
"""Where a prompt template has the media."""
_SAMPLED_BYTES = 1 << 16
_NAMED: Mapping[Kind, str] = {
    "image": ".jpg .jpeg .png .webp .bmp .gif .tif .tiff",
    "video": ".mp4 .mkv .webm .mov .avi .m4v",
    "audio": ".wav .flac .mp3 .m4a .ogg .opus",
}
SUFFIXES: Mapping[str, Kind] = {suffix: kind for kind, suffixes in _NAMED.items() for suffix in suffixes.split()}
"""What kind of medium a file is, by the end of its name: which files of a folder, or of a tar, are taken."""


def suffix_of(name: str) -> str:
    """The end of a file's name, as `SUFFIXES` has it."""
    return PurePath(name).suffix.lower()


@dataclass(frozen=True, slots=True)
class Files:
    """A row of a tar."""

    key: str
    files: dict[str, bytes]
    """By name, in order."""


Record = bytes | dict[str, Any] | Files
"""A line of JSON, a row of a table, files."""


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive rows of one file: what one worker does at a time, and what is done again if it dies."""

    number: int
    file: int
    """Index of the source."""
    first_row: int
    """In the whole input."""
    num_rows: int
    start: int
    """Where it begins in its file: a byte, or a row of a table."""
    stop: int

    @property
    def stop_row(self) -> int:
        """One past its last row."""
        return self.first_row + self.num_rows


class Source(ABC):
    """A file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Where its last chunk stops."""
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        """Tells it from another file, without reading all of it: its size, its ends."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = blake3(str(size).encode())
            for at in (0, max(0, size - _SAMPLED_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLED_BYTES))
        return digest.hexdigest(16)

    @abstractmethod
    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """(rows, start, stop) of chunks of `num_rows` rows, the last one of fewer."""

    @abstractmethod
    def records(self, start: int, stop: int) -> Iterator[Record]:
        """The rows of a chunk as they stand in the file: nothing in one of them is looked at here."""


class JSONLines(Source):
    """A row a line. Lines of blanks are none, nor is a byte order mark."""

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        with self.path.open("rb") as file:
            rows = 0
            start = stop = file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
            for line in file:
                stop += len(line)
                rows += not line.isspace()
                if rows == num_rows:
                    yield rows, start, stop
                    rows, start = 0, stop
            if rows:
                yield rows, start, stop

    def records(self, start: int, stop: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(start)
            while start < stop:
                line = file.readline()
                start += len(line)
                if not line.isspace():
                    yield line


class Table(Source):
    """A Parquet file, of which some columns can be chosen."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow.parquet as pq  # late: the parent of the workers does with what lists its files

        super().__init__(path)
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as Parquet: {error}") from None
        if missing := set(columns) - set(self._file.schema_arrow.names):
            raise InputError(f"{path} has no column {sorted(missing)}; it has {self._file.schema_arrow.names}")
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group_starts = list(accumulate(sizes[:-1], initial=0))
        self._columns = list(columns) or None
        self._at = 0
        self._rows: Iterator[dict[str, Any]] = iter(())

    @property
    def size(self) -> int:
        return int(self._file.metadata.num_rows)

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        for start in range(0, self.size, num_rows):
            stop = min(start + num_rows, self.size)
            yield stop - start, start, stop

    def records(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        # Within one row group a worker goes on behind its last chunk: to begin anew is to decode what lies before.
        first = self._group_starts[bisect_right(self._group_starts, start) - 1]
        if not first < self._at <= start:
            self._at, self._rows = first, self._read(self._group_starts.index(first))
        for _ in islice(self._rows, start - self._at):
            pass
        for at in range(start, stop):
            row = next(self._rows)
            self._at = at + 1
            yield row

    def _read(self, first_group: int) -> Iterator[dict[str, Any]]:
        groups = list(range(first_group, self._file.metadata.num_row_groups))
        for batch in self._file.iter_batches(batch_size=16, row_groups=groups, columns=self._columns):
            yield from batch.to_pylist()


class Tar(Source):
    """WebDataset: files of one name up to its first dot are one row."""

    def cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        rows, start, stop, last = 0, 0, 0, None
        for member in self._members(0):
            if (key := _key(member.name)) != last:
                if rows == num_rows:
                    yield rows, start, member.offset
                    rows, start = 0, member.offset
                rows, last = rows + 1, key
            stop = member.offset_data + member.size
        if rows:
            yield rows, start, stop

    def records(self, start: int, stop: int) -> Iterator[Files]:
        key, files = "", dict[str, bytes]()
        with self.path.open("rb") as file:
            for member in self._members(start):
                if member.offset >= stop:
                    break
                if (name := _key(member.name)) != key:
                    if files:
                        yield Files(key, files)
                    key, files = name, {}
                file.seek(member.offset_data)
                files[member.name] = file.read(member.size)
        if files:
            yield Files(key, files)

    def _members(self, start: int) -> Iterator[tarfile.TarInfo]:
        """The regular files from `start` on, in order."""
        with self.path.open("rb") as file:
            file.seek(start)
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        tar.members = []  # type: ignore[attr-defined]  # it would keep every one
                        if member.isfile():
                            yield member
            except tarfile.TarError as error:
                raise InputError(f"{self.path} cannot be read as an uncompressed tar: {error}") from None


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}" if folder else base.partition(".")[0]


def open_source(path: Path, columns: Sequence[str]) -> Source:
    """The source that a file is, by the end of its name. InputError."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    suffix = suffix_of(path.name)
    if suffix in (".jsonl", ".ndjson"):
        return JSONLines(path)
    if suffix in (".parquet", ".pq"):
        return Table(path, columns)
    if suffix == ".tar":
        return Tar(path)
    raise InputError(f"{path} is none of .jsonl, .ndjson, .parquet, .pq and .tar, and no folder of media")


def chunks(sources: Sequence[Source], num_rows: int, limit: int | None) -> Iterator[Chunk]:
    """All rows, or the first `limit`, in chunks of `num_rows`; none reaches from one file into the next."""
    number = first_row = 0
    for index, source in enumerate(sources):
        for rows, start, stop in source.cut(num_rows):
            taken = rows if limit is None else min(rows, limit - first_row)
            if taken <= 0:
                return
            yield Chunk(number, index, first_row, taken, start, stop)
            number, first_row = number + 1, first_row + taken
