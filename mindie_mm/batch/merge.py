"""Combines the parts of a run, which several machines may have written, into one run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mindie_mm.batch.input.files import file_digest, replacing
from mindie_mm.batch.input.remote import RemoteFile, file_at
from mindie_mm.batch.output.manifest import MANIFEST_FILE, Manifest, Shard
from mindie_mm.batch.output.run_folder import RunFolder, StagedFolder, copies_of
from mindie_mm.batch.output.shard import arrays_path, finished_shard, table_path
from mindie_mm.batch.output.store import Store, output_at
from mindie_mm.batch.run import clean, opened_folder, require_run
from mindie_mm.batch.same_run import differences
from mindie_mm.batch.settings import LOCATIONS, RUN_FILE
from mindie_mm.errors import InputError, StorageError, os_errors_as

_COPIES = "input-merge"
"""Folder in the run's folder for copies of a shard from a store."""


def merge(parts: Sequence[Path | str], output: Path | str) -> tuple[Manifest, list[str]]:
    """Combine the folders of all parts into one run in `output`. A second call continues an unfinished merge.

    Folders may be local, or URLs. The files have the same bytes as those of a run without parts, except for paths that
    differ.

    Returns:
        The manifest of the run, and descriptions of the paths in the parts' settings that differ.

    Raises:
        InputError: The folders do not contain exactly the parts of one run, or `output` cannot be used.
        CorruptReference: A part was changed since it was written.
        StorageError: The run cannot be written, or the store of a part fails.

    """
    manifests = [(part, Manifest.read(part)) for part in map(file_at, parts)]
    _require_whole(manifests)
    run = msgspec.structs.replace(manifests[0][1].run, part="")
    with opened_folder(output_at(output)) as destination:
        destination.fetch(RUN_FILE, MANIFEST_FILE)
        require_run(destination)
        run.begin(destination.path, str(destination))
        destination.put(RUN_FILE)
        shutil.rmtree(destination.path / _COPIES, ignore_errors=True)  # left by a call that was killed
        for part, manifest in manifests:
            for shard in manifest.shards:
                _take(part, destination, shard, run.digest)
        num_rows = sum(manifest.num_rows for _, manifest in manifests)
        whole = Manifest.write(destination.path, run, num_rows, called=str(destination))
        clean(destination, (), whole)
    return whole, _differing_paths([manifest for _, manifest in manifests])


def _require_whole(manifests: Sequence[tuple[Path | RemoteFile, Manifest]]) -> None:
    """Raise InputError unless these are the manifests of all parts of one run."""
    (folder, first), *others = manifests
    for path, manifest in manifests:
        if not manifest.run.part:
            raise InputError(f"{path} is not a part of a run: it was written without --part")
    for path, manifest in others:
        if changes := differences(first.run.parts(), manifest.run.parts()):
            raise InputError(f"{folder} and {path} are parts of different runs: {'; '.join(changes.values())}")
    named = [manifest.run.part for _, manifest in manifests]
    numbers = [part.partition("/") for part in named]
    counts = {int(count) for *_, count in numbers}
    given = sorted(int(number) for number, *_ in numbers)
    if len(counts) > 1 or given != [*range(1, max(counts) + 1)]:
        raise InputError(f"the folders have the parts {', '.join(named)}; give each of the parts 1/N to N/N once")


def _take(part: Path | RemoteFile, destination: RunFolder, shard: Shard, run: str) -> None:
    """Check the files of a shard, and link or copy them to the merged run.

    Files in a store are not copied a second time.

    The table comes last, because a shard with a table is complete.
    """
    folder, first = destination.path, shard.info.first_row
    is_local = isinstance(part, Path) and not isinstance(destination, StagedFolder)
    if not is_local and finished_shard(folder, first, run) and file_digest(folder / shard.table) == shard.table_digest:
        return
    with _copied(part, folder / _COPIES, shard) as own:
        shard.verify(own)
        arrays, table = arrays_path(own, first), table_path(own, first)
        destination.put_shard(arrays, table, table.name)
        for path in (table,) if isinstance(destination, StagedFolder) else (arrays, table):
            _link(path, folder / path.name)


@contextmanager
def _copied(part: Path | RemoteFile, copies: Path, shard: Shard) -> Iterator[Path]:
    """Yield the folder of a part. If it is in a store, yield a local folder with copies of the files of a shard."""
    if isinstance(part, Path):
        yield part
        return
    url, first = part.url.rstrip("/"), shard.info.first_row
    with os_errors_as(StorageError, f"{copies} cannot be written"):
        copies.mkdir()
    try:
        Store(url).get([path(copies, first).name for path in (arrays_path, table_path)], copies)
        with copies_of(url, copies):
            yield copies
    finally:
        shutil.rmtree(copies, ignore_errors=True)


def _link(path: Path, target: Path) -> None:
    """Link or copy a file."""
    with os_errors_as(StorageError, f"{target} cannot be written"):
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another file system, or one without links
            with replacing(target) as unfinished:
                shutil.copyfile(path, unfinished)


def _differing_paths(manifests: Sequence[Manifest]) -> list[str]:
    paths = [{name: getattr(manifest.run.settings, name) for name in sorted(LOCATIONS)} for manifest in manifests]
    return [change for other in paths[1:] for change in differences(paths[0], other).values()]
