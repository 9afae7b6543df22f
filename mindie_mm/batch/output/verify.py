"""Checks of the files of a finished run. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

from blake3 import blake3

from mindie_mm.batch.input.files import content_digest
from mindie_mm.batch.input.remote import RemoteFile, reading_run
from mindie_mm.batch.output.array_file import file_bytes, read_arrays
from mindie_mm.batch.output.disk_writer import StoredArray
from mindie_mm.batch.output.manifest import (
    DATA_FILES,
    ERRORS_FILE,
    MANIFEST_FILE,
    README_FILE,
    Manifest,
    Shard,
    failed_line,
)
from mindie_mm.batch.output.shard import arrays_path, counts_of, info_in, table_path
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.progress import Progress, Show
from mindie_mm.batch.settings import RUN_FILE, Run
from mindie_mm.errors import CorruptReference

_CONVERTED_ROWS = 64
"""Number of rows that are converted at a time, because a list of ids takes four times the memory of an array."""
_TOTALS = ("num_errors", "num_tokens", "num_items", "num_bytes")


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage to a file of a run."""

    message: str
    """Path of the file, and the reason."""
    remove: Path | RemoteFile
    """File to remove, so that another call to `mindie-mm tokenize` repairs the damage."""
    rows: range = range(0)
    """Rows that are damaged."""

    def __str__(self) -> str:
        if not self.rows:
            return self.message
        first, last = self.rows[0], self.rows[-1]
        return f"row{f' {first}' if first == last else f's {first} to {last}'}: {self.message}"


def damages(folder: Path | RemoteFile, manifest: Manifest, show: Show) -> Iterator[Damage]:
    """Read all files of a run, and yield the damages. Memory is needed for the rows of one shard, without arrays.

    Raises:
        StorageError: The store of the folder fails.

    """
    infos = [shard.info for shard in manifest.shards]
    for name in _TOTALS:
        if (total := sum(getattr(info, name) for info in infos)) != (stated := getattr(manifest, name)):
            file = folder / MANIFEST_FILE
            yield Damage(f"{file} is damaged: {name} is {stated}, but the shards have {total}", file)
    own = {path(folder, info.first_row) for info in infos for path in (table_path, arrays_path)}
    with reading_run(folder):
        present = {*folder.glob("shard-*.parquet"), *folder.glob("shard-*.safetensors")}
    for path in sorted(present - own):
        yield Damage(f"{path} is not a file of this run, but other programs would read it", path)
    yield from _damages_of_description(folder, manifest)
    rows = errors = num_bytes = 0
    failed: blake3 | None = blake3()
    for shard in manifest.shards:
        records = list[ShardRow]()
        found = [*_damages_of(folder, shard, records)]
        yield from found
        if failed is not None and len(records) == shard.info.num_rows:
            failed.update(b"".join(map(failed_line, records)))
        else:
            failed = None
        rows, num_bytes = rows + shard.info.num_rows, num_bytes + shard.info.num_bytes
        errors += len({row for damage in found for row in damage.rows})
        show(Progress(rows, errors, num_bytes, rows / manifest.num_rows), Progress())
    yield from _damages_of_list(folder, manifest, failed)


def _damages_of_description(folder: Path | RemoteFile, manifest: Manifest) -> Iterator[Damage]:
    """Check run.json against the manifest.

    Check README.md, from which the `datasets` library learns where the tables are.
    """
    file = folder / RUN_FILE
    try:
        if Run.read(file) != manifest.run:
            yield Damage(f"{file} describes the run otherwise than {MANIFEST_FILE}", file)
    except CorruptReference as error:
        yield Damage(str(error), file)
    file = folder / README_FILE
    try:
        with reading_run(file):
            content = file.read_bytes()
        if DATA_FILES.encode() not in content:
            yield Damage(f"{file} does not tell `datasets` which files are tables: it has no line {DATA_FILES!r}", file)
    except CorruptReference as error:
        yield Damage(str(error), file)


def _damages_of_list(folder: Path | RemoteFile, manifest: Manifest, failed: blake3 | None) -> Iterator[Damage]:
    """Check the list of failed rows.

    `failed` is the digest of the list that the tables imply. It is None if a table is damaged. Then only the length of
    the list is checked.
    """
    file = folder / ERRORS_FILE
    try:
        with reading_run(file):
            digest = content_digest(file.read_bytes())
        manifest.failed_rows(folder)
        if failed is not None and digest != failed.hexdigest(16):
            yield Damage(f"{file} is not the list of the {manifest.num_errors} failed rows that the tables have", file)
    except CorruptReference as error:
        yield Damage(str(error), file)


def _damages_of(folder: Path | RemoteFile, shard: Shard, rows: list[ShardRow]) -> Iterator[Damage]:
    """Check the files of a shard. The rows of an undamaged table are added to `rows`."""
    info = shard.info
    table, path = (path(folder, info.first_row) for path in (table_path, arrays_path))
    every = range(info.first_row, info.stop_row)
    try:
        rows += _rows(folder, shard)
    except CorruptReference as error:
        yield Damage(str(error), table, every)
    try:
        with reading_run(path):
            digest, size, found = read_arrays(path)
    except CorruptReference as error:
        yield Damage(str(error), table, every)
        return
    differing = _differing(rows, found)
    for damaged in _ranges(differing):
        name = differing[damaged.start]
        yield Damage(f"{path} does not have the array {name} that its table describes", table, damaged)
    if differing:
        return
    if digest != info.arrays_digest or size != file_bytes(info.num_bytes):
        reason = f"is not the file that the run wrote: its digest is {digest}; the manifest has {info.arrays_digest}"
        yield Damage(f"{path} {reason}", table, every)
    elif rows and found:
        yield Damage(f"{path} has the array {min(found)}, which its table does not list", table, every)


def _differing(rows: Iterable[ShardRow], found: dict[str, StoredArray]) -> dict[int, str]:
    """Return the rows that have an array different from the file's, each with the name of its first such array.

    The arrays of all `rows` are removed from `found`.
    """
    differing = dict[int, str]()
    for row in rows:
        for index, arrays in enumerate(row.arrays or ()):
            for array in arrays:
                name = f"{row.row}.{index}.{array.name}"
                if found.pop(name, None) != array:
                    differing.setdefault(row.row, name)
    return differing


def _ranges(rows: Iterable[int]) -> Iterator[range]:
    """Yield the ranges of consecutive numbers in `rows`, which are sorted."""
    for _, group in groupby(enumerate(rows), lambda item: item[1] - item[0]):
        numbers = [row for _, row in group]
        yield range(numbers[0], numbers[-1] + 1)


def _rows(folder: Path | RemoteFile, shard: Shard) -> list[ShardRow]:
    """Return the rows of a shard. Raise CorruptReference if the rows are not those that the manifest describes."""
    info, path = shard.info, table_path(folder, shard.info.first_row)
    table = shard.read_table(folder)
    if info_in(table.schema.metadata, path) != info:
        raise CorruptReference(f"{path} describes its shard otherwise than the manifest")
    rows = list[ShardRow]()
    pieces = table.to_batches(max_chunksize=_CONVERTED_ROWS)
    for number, record in enumerate(chain.from_iterable(piece.to_pylist() for piece in pieces), info.first_row):
        rows.append(ShardRow.of(record))
        if record["row"] != number:
            raise CorruptReference(f"{path} has the row {record['row']} at the place of row {number}")
    for name, count in counts_of(rows).items():
        if count != getattr(info, name):
            raise CorruptReference(f"{path} is damaged: {name} is {getattr(info, name)}, but its rows have {count}")
    return rows
