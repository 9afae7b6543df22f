"""The manifest of a finished run, with counts, settings and digests. The same input produces the same manifest."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from mindie_mm.batch.input.files import content_digest, file_digest, replacing
from mindie_mm.batch.input.remote import RemoteFile, reading_run
from mindie_mm.batch.input.repeated import RepeatedIds
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.batch.output.array_file import digest_of as arrays_digest
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.output.shard import ShardInfo, arrays_path, read_info, read_table, table_path
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.settings import RUN_FILE, Run, RunFormat, require_format
from mindie_mm.errors import CorruptReference, InputError, StorageError, os_errors_as
from mindie_mm.inputs.checks import counted
from mindie_mm.msgspec_errors import in_words

_log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
ERRORS_FILE = "errors.jsonl"
README_FILE = "README.md"
_SHARD_FILES = [f"shard-[0-9]*.{suffix}" for suffix in ("parquet", "safetensors", "journal")]
_WRITE_AGAIN = "Remove this file, and run the command of `mindie-mm tokenize` again, which keeps the shards"
DATA_FILES = "data_files: shard-*.parquet"
_README = f"""---
configs:
- config_name: default
  {DATA_FILES}
---

This folder was written by `mindie-mm tokenize`. `manifest.json` describes its content. Each table `shard-*.parquet`
has the token ids of some rows, and the safetensors file of the same name has the arrays of their media. The column
`arrays` has the position of each array in this file.
"""
"""Page that tells `datasets.load_dataset` which files of the folder are tables of rows."""


class Shard(msgspec.Struct, frozen=True):
    """A shard and its files."""

    table: str
    table_digest: str
    """First 128 bits of the table's BLAKE3 digest, in hexadecimal."""
    info: ShardInfo

    def verify(self, folder: Path) -> None:
        """Check that both files in `folder` have the content that the run wrote.

        Raises:
            CorruptReference: A file has different content or cannot be read.

        """
        table, arrays = (path(folder, self.info.first_row) for path in (table_path, arrays_path))
        with reading_run(table):
            _require_digest(table, file_digest(table), self.table_digest)
        with reading_run(arrays):
            _require_digest(arrays, arrays_digest(arrays), self.info.arrays_digest)

    def read_table(self, folder: Path | RemoteFile) -> pa.Table:
        """Return the table.

        Raises:
            CorruptReference: The file is not the file that the run wrote, or cannot be read.
            StorageError: The store of the folder fails.

        """
        path = table_path(folder, self.info.first_row)
        with reading_run(path):
            content = path.read_bytes()
        _require_digest(path, content_digest(content), self.table_digest)
        return read_table(path, self.info.num_rows, content=content)


def _require_digest(path: Path | RemoteFile, actual: str, written: str) -> None:
    if actual != written:
        raise CorruptReference(
            f"{path} is not the file that the run wrote: its digest is {actual}; the manifest has {written}"
        )


class _Failed(msgspec.Struct, frozen=True):
    """The part of a line in the list of failed rows that is read again."""

    row: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a finished run."""

    run: Run
    num_rows: int
    num_errors: int
    num_tokens: int
    num_items: int
    num_bytes: int
    """Size of the arrays and their padding in bytes."""
    num_repeated_ids: int = 0
    """Number of rows that repeat the id of an earlier row."""
    shards: list[Shard]

    @classmethod
    def write(cls, folder: Path, run: Run, num_rows: int, first_row: int = 0, called: str = "") -> Manifest:
        """Write the manifest of a finished run, and a file that lists the rows that failed.

        A warning is logged if rows share an id. `first_row` is the first of the run's rows. Messages call the folder
        `called`, for example by its URL.

        Raises:
            StorageError: Some shards are missing, for example because other nodes wrote them to their own disks.

        """
        shards = _shards(folder, run.digest, first_row)
        infos = [shard.info for shard in shards]
        if (num_present := sum(info.num_rows for info in infos)) != num_rows:
            raise StorageError(
                f"{called or folder} has only the first {num_present} of {num_rows} rows. If other nodes wrote the "
                "other shards to a folder of their own, copy these shards. Then run the command again"
            )
        repeated = RepeatedIds.of(_ids(folder, shard) for shard in shards)
        if repeated.num_rows:
            _warn(repeated)
        manifest = cls(
            run=run,
            num_repeated_ids=repeated.num_rows,
            num_rows=sum(info.num_rows for info in infos),
            num_errors=sum(info.num_errors for info in infos),
            num_tokens=sum(info.num_tokens for info in infos),
            num_items=sum(info.num_items for info in infos),
            num_bytes=sum(info.num_bytes for info in infos),
            shards=shards,
        )
        with replacing(folder / ERRORS_FILE) as unfinished, unfinished.open("wb") as file:
            for shard in shards:
                if shard.info.num_errors:
                    table = read_table(folder / shard.table, shard.info.num_rows).select(["row", "id", "error"])
                    for row in table.filter(pc.field("error").is_valid()).to_pylist():
                        file.write(_line_of(**row))
        with replacing(folder / README_FILE) as unfinished:
            unfinished.write_text(_README, encoding="utf-8")
        with replacing(folder / MANIFEST_FILE) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        own = {path(folder, info.first_row) for info in infos for path in (table_path, arrays_path)}
        for left in {path for pattern in _SHARD_FILES for path in folder.glob(pattern)} - own:
            left.unlink(missing_ok=True)  # otherwise, other readers of the folder would find rows twice
        return manifest

    @property
    def digest(self) -> str:
        """Digest of the rows. It depends on the content of the shards, but not on the paths of the inputs."""
        return blake3(msgspec.json.encode((self.run.digest, self.shards))).hexdigest(16)

    @property
    def first_row(self) -> int:
        """Number of the first row. It is 0 unless the run is a part."""
        return self.shards[0].info.first_row if self.run.part and self.shards else 0

    def failed_rows(self, folder: Path | RemoteFile) -> frozenset[int]:
        """Return the numbers of the rows that failed, from their list in `folder`.

        Raises:
            CorruptReference: The list does not belong to this manifest.
            StorageError: The list cannot be read.

        """
        file = folder / ERRORS_FILE
        with os_errors_as(StorageError, f"{file} cannot be read"):
            lines = file.read_bytes().splitlines()
        try:
            rows = frozenset(msgspec.json.decode(line, type=_Failed).row for line in lines)
        except NOT_JSON as error:
            raise CorruptReference(f"{file} is damaged: {in_words(error)}") from None
        if len(rows) != self.num_errors:
            raise CorruptReference(
                f"{file} has {counted(len(rows), 'row')}, but {counted(self.num_errors, 'row')} failed"
            )
        return rows

    @classmethod
    def read(cls, folder: Path | RemoteFile) -> Manifest:
        """Read the manifest in `folder`.

        Raises:
            InputError: There is no finished run, its format is not supported, or the store cannot be read.
            CorruptReference: The file is damaged.
            StorageError: The file cannot be read.

        """
        file = folder / MANIFEST_FILE
        try:
            content = file.read_bytes()
            require_format(msgspec.json.decode(content, type=_OfRun).run, folder)
            manifest = msgspec.json.decode(content, type=cls)
        except NotADirectoryError:
            raise InputError(f"{folder} is a file. Give the folder of a finished run") from None
        except FileNotFoundError:
            raise InputError(f"{folder} does not contain a finished run: there is no {MANIFEST_FILE}") from None
        except OSError as error:
            kind = InputError if isinstance(folder, RemoteFile) else StorageError
            raise kind(f"{file} cannot be read: {error.strerror or error}") from error
        except NOT_JSON as error:
            raise CorruptReference(f"{file} is damaged: {in_words(error)}. {_WRITE_AGAIN}") from None
        first = manifest.first_row
        stops = [first, *(shard.info.stop_row for shard in manifest.shards)]
        firsts = [*(shard.info.first_row for shard in manifest.shards), first + manifest.num_rows]
        if stops != firsts or any(shard.info.num_rows < 1 for shard in manifest.shards):
            raise CorruptReference(
                f"{file} is damaged: its shards do not contain exactly the rows {first} to "
                f"{first + manifest.num_rows - 1}. {_WRITE_AGAIN}"
            )
        return manifest


class _OfRun(msgspec.Struct):
    run: RunFormat


def failed_line(row: ShardRow) -> bytes:
    """Return the line of a row in the list of failed rows, or nothing if the row has not failed."""
    return b"" if row.error is None else _line_of(row.row, row.id, row.error)


def _line_of(row: int, id: str, error: str) -> bytes:  # noqa: A002 - the name of the column
    return msgspec.json.encode({"row": row, "id": id, "error": error}) + b"\n"


def restore_run_file(folder: RunFolder) -> None:
    """Write run.json from the manifest of a finished run if run.json is missing or damaged.

    Raises:
        InputError: The manifest is of another version.
        CorruptReference: The manifest is damaged.
        StorageError: A file cannot be read or written.

    """
    file = folder.path / RUN_FILE
    if not (folder.path / MANIFEST_FILE).is_file():
        return
    try:
        Run.read(file)
    except CorruptReference as error:
        run = Manifest.read(folder.path).run
        _log.warning(
            "%s. It was written again from %s", str(error).replace(str(folder.path), str(folder)), MANIFEST_FILE
        )
        run.write(folder.path)


def _ids(folder: Path, shard: Shard) -> list[str]:
    table = read_table(folder / shard.table, shard.info.num_rows, ["id"])
    ids: list[str] = table.column("id").to_pylist()
    return ids


def _warn(repeated: RepeatedIds) -> None:
    _log.warning(
        "%d rows have the same id as an earlier row, for example rows %s. Join results to the input by `row`, "
        "which is unique",
        repeated.num_rows,
        ", ".join(f"{first} and {row}" for first, row in repeated.examples),
    )


def drop_changed(folder: RunFolder, run: Run) -> None:
    """Remove tables that were changed after the run was finished, so that their shards are written again.

    The next manifest would otherwise record the changed tables as valid. The files of arrays are not checked here.

    Raises:
        CorruptReference: The manifest is damaged.
        StorageError: A file cannot be read or removed.

    """
    if not (folder.path / MANIFEST_FILE).exists():
        return
    manifest = Manifest.read(folder.path)
    for shard in manifest.shards if manifest.run.digest == run.digest else ():
        path = table_path(folder.path, shard.info.first_row)
        with os_errors_as(StorageError, f"{path} cannot be read or removed"):
            if path.exists() and (actual := file_digest(path)) != shard.table_digest:
                _log.warning(
                    "%s is not the file that the run wrote: its digest is %s; the manifest has %s. The shard "
                    "will be written again",
                    f"{folder}/{path.name}",
                    actual,
                    shard.table_digest,
                )
                folder.remove(path.name)


def drop_failed(folder: RunFolder, run: Run) -> None:
    """Remove the tables of a run that have failed rows, so that their shards are written again.

    The manifest is removed first. After an interruption, new tables would otherwise count as changed.

    Raises:
        StorageError: A table or the manifest cannot be removed.

    """
    for path in folder.path.glob("shard-*.parquet"):
        with suppress(CorruptReference), os_errors_as(StorageError, f"{path} cannot be removed"):
            info = read_info(path)
            if info.run == run.digest and info.num_errors:
                folder.remove(MANIFEST_FILE)
                folder.remove(path.name)


def _shards(folder: Path, run: str, row: int) -> list[Shard]:
    """Return the consecutive shards from `row` on that belong to the run with the digest `run`."""
    shards: list[Shard] = []
    while (path := table_path(folder, row)).is_file():
        info = read_info(path)
        if info.run != run:
            break
        shards.append(Shard(path.name, file_digest(path), info))
        row = info.stop_row
    return shards
