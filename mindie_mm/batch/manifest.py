"""What a finished run is: counts, settings, fingerprints, digests. The same for the same input."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mindie_mm.batch.files import file_digest, replacing
from mindie_mm.batch.settings import Run
from mindie_mm.batch.shard import ShardInfo, read_info, read_rows, table_path
from mindie_mm.errors import CorruptReference, InputError, StorageError

MANIFEST_FILE = "manifest.json"
ERRORS_FILE = "errors.jsonl"


class Shard(msgspec.Struct, frozen=True):
    """One shard, by its files."""

    table: str
    table_digest: str
    """BLAKE3, as `info.arena_digest`."""
    info: ShardInfo


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    run: Run
    num_rows: int
    num_errors: int
    num_tokens: int
    num_items: int
    num_bytes: int
    """Of blocks."""
    shards: list[Shard]

    @classmethod
    def write(cls, folder: Path, run: Run, num_rows: int) -> Manifest:
        """Counts the shards in `folder`, lists the rows that failed, and says so: the run of `num_rows` is finished.

        StorageError where shards are missing: other nodes have them on disks of their own.
        """
        shards = _shards(folder)
        infos = [shard.info for shard in shards]
        if (found := sum(info.num_rows for info in infos)) != num_rows:
            raise StorageError(
                f"{folder} has the first {found} of {num_rows} rows: copy the shards here that other nodes wrote to "
                "the same folder of theirs, and call again"
            )
        manifest = cls(
            run=run,
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
                    for row in read_rows(folder / shard.table):
                        if row.error is not None:
                            file.write(msgspec.json.encode({"row": row.row, "id": row.id, "error": row.error}) + b"\n")
        with replacing(folder / MANIFEST_FILE) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """InputError where there is no finished run, CorruptReference where its file is damaged."""
        file = folder / MANIFEST_FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            raise InputError(f"{folder} holds no finished run: there is no {MANIFEST_FILE}") from None
        except msgspec.DecodeError as error:
            raise CorruptReference(f"{file} is damaged: {error}") from None


def _shards(folder: Path) -> list[Shard]:
    """From the first row on, each where the one before it stops."""
    found: list[Shard] = []
    row = 0
    while (path := table_path(folder, row)).is_file():
        info = read_info(path)
        found.append(Shard(path.name, file_digest(path), info))
        row = info.stop_row
    return found
