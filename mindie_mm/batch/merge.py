"""Combines the parts of a run, which several machines may have written, into one run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.output.manifest import Manifest, Shard
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.run import locked_folder, require_run
from mindie_mm.batch.same_run import differences
from mindie_mm.batch.settings import LOCATIONS
from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.settings.paths import absolute


def merge(parts: Sequence[Path], folder: Path) -> tuple[Manifest, list[str]]:
    """Combine the folders of all parts into one run in `folder`. A second call continues an unfinished merge.

    The files have the same bytes as those of a run without parts, except for paths that differ.

    Returns:
        The manifest of the run, and descriptions of the paths in the parts' settings that differ.

    Raises:
        InputError: The folders do not contain exactly the parts of one run, or `folder` cannot be used.
        CorruptReference: A part was changed since it was written.
        StorageError: The run cannot be written.

    """
    folder = absolute(folder)
    manifests = [(part, Manifest.read(part)) for part in map(absolute, parts)]
    _require_whole(manifests)
    run = msgspec.structs.replace(manifests[0][1].run, part="")
    with locked_folder(folder):
        require_run(RunFolder(folder))
        run.begin(folder)
        for part, manifest in manifests:
            for shard in manifest.shards:
                shard.verify(part)
                _take(part, folder, shard)
        whole = Manifest.write(folder, run, sum(manifest.num_rows for _, manifest in manifests))
    return whole, _differing_paths([manifest for _, manifest in manifests])


def _require_whole(manifests: Sequence[tuple[Path, Manifest]]) -> None:
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


def _take(part: Path, folder: Path, shard: Shard) -> None:
    """Link or copy the files of a shard. The table comes last, because a shard with a table is complete."""
    table = part / shard.table
    files = sorted(part.glob(f"{table.stem}.*"), key=lambda path: path == table)
    for path in files:
        target = folder / path.name
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
