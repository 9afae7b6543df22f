"""Executes a run. Finished chunks are skipped. Workers on this machine or on a Ray cluster process the other chunks."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from mindie_mm.batch.input.file_state import STATES_FILE, InputStates
from mindie_mm.batch.input.files import creating, locked
from mindie_mm.batch.input.gather import Write, drop_gathered, gather, is_stream
from mindie_mm.batch.input.remote import as_os_errors, system_of
from mindie_mm.batch.input.request import REQUEST
from mindie_mm.batch.input.source import Chunk, chunks
from mindie_mm.batch.output.journal import forget_failures
from mindie_mm.batch.output.lease import holder_of
from mindie_mm.batch.output.manifest import (
    ERRORS_FILE,
    MANIFEST_FILE,
    README_FILE,
    Manifest,
    drop_changed,
    drop_failed,
    restore_run_file,
)
from mindie_mm.batch.output.run_folder import SHARD_FILE, RunFolder, StagedFolder, staging_path
from mindie_mm.batch.output.shard import SCHEMA
from mindie_mm.batch.output.shard_row import ASSISTANT
from mindie_mm.batch.output.store import Store, access_is_needed
from mindie_mm.batch.progress import Show
from mindie_mm.batch.settings import RUN_FILE, Run, Settings, part_of
from mindie_mm.batch.tally import Tally
from mindie_mm.batch.workers import TIMINGS_FILE, Workers
from mindie_mm.errors import InputError, StorageError, TooManyErrors, os_errors_as
from mindie_mm.processes.loop_thread import run_to_end
from mindie_mm.settings.paths import absolute, is_url
from mindie_mm.shm.liveness_lock import is_same

LOCK_FILE = ".lock"
_NAME_A_FOLDER = "Choose a folder that you may write to, or one that does not exist yet"
_RUN_FILES = re.compile(rf"\.lock|at-[0-9]+\.json|{SHARD_FILE.pattern}|(input-|run\.json).*")
"""Names of files that a folder may contain before run.json is written: the lock, gathered input, and files from other
nodes."""
_OF_SHARDS = frozenset({TIMINGS_FILE, ERRORS_FILE, README_FILE})
"""Names of other files of a run, which a folder with shards may contain if run.json was removed."""
_LEFT_BY_ACTORS = ("at-*.json", "input-*.partial")
"""Files that Ray actors leave in a node's folder if they are killed. Users may copy these files with the shards."""


def run_batch(
    settings: Settings,
    output: Path | str,
    *,
    num_workers: int | None = None,
    max_errors: int | None = None,
    show: Show = lambda *_: None,
    ray_address: str | None = None,
    part: str = "",
    retry_errors: bool = False,
    sandbox: bool = False,
    rows: Mapping[str, Write] | None = None,
    staging: Path | None = None,
) -> tuple[Manifest, Counter[str]]:
    """Process the unfinished part of a run, and write its manifest. After an error, a second call continues the run.

    Args:
        settings: Settings of the run.
        output: Folder of the run, which is created if it does not exist, or its URL in an object store.
        num_workers: Number of worker processes or Ray actors. The default is one per core.
        max_errors: Maximum number of rows that may fail, or None for any number. The run stops if more rows fail.
        show: Callback for each row.
        ray_address: Address of a Ray cluster, "local" to start a cluster on this machine, or None to use worker
            processes.
        part: Part of the rows to process, such as "2/4". `merge` combines the folders of all parts.
        retry_errors: Whether to process the shards with failed rows again.
        sandbox: Whether sandboxed processes decode media.
        rows: Functions that write the rows of a program, by name of the input.
        staging: Local folder for the open shards of a run in a store. The default is the temporary directory.

    Returns:
        The manifest, and the number of files in media folders that were left out because they are not media, for each
        extension.

    Raises:
        InputError: The folder cannot be used or contains another run, or the input cannot be read.
        StorageError: The output cannot be written, or an input file changed while the run read it.
        ProcessDied: A worker died before it was ready, or at a row that should have been skipped.
        TooManyErrors: More than `max_errors` rows failed.

    """
    if num_workers is not None and num_workers < 1:
        raise InputError(f"num_workers={num_workers} must be at least 1")
    output = output if isinstance(output, str) else absolute(output)
    _require_apart(settings.inputs, output)
    with opened_folder(output, staging) as destination:
        folder = destination.path
        destination.fetch(RUN_FILE, MANIFEST_FILE, STATES_FILE)
        restore_run_file(destination)
        require_run(destination)
        with ExitStack() as refused:
            refused.callback(drop_gathered, settings.inputs, folder)
            left_out = gather(settings.inputs, folder, settings.template, None, settings.limit, rows)
            sources = settings.sources(folder)
            for source in sources:
                source.check()
            _require_free(settings.keep_columns)
            part_of(part, 0)
            run = msgspec.structs.replace(Run.of(settings, folder, sources), part=part)
            run.begin(folder, str(destination))
            refused.pop_all()
        now = [source.state for source in sources]
        states = InputStates(begun=InputStates.read(folder).begun or now, now=now)
        states.write(folder)
        destination.put(RUN_FILE, STATES_FILE)
        drop_changed(destination, run)
        if retry_errors:
            drop_failed(destination, run)
            forget_failures(folder)
        every = chunks(sources, settings.shard_rows, settings.limit)
        first_row, share = 0, 1.0
        if part:
            own, share = _part(part, [*every])
            every, first_row = iter(own), own[0].first_row if own else 0
        tally = Tally(run, destination, sources, max_errors, show, states.begun, share)
        if ray_address is None:
            try:
                run_to_end(Workers(destination, every, tally, sandbox=sandbox).run(num_workers))
            except TooManyErrors:
                forget_failures(folder)
                raise
        else:
            from mindie_mm.batch import on_ray  # imported late, because Ray is an extra and slow to import

            waiting = [chunk for chunk in every if not tally.is_done(chunk)]
            for chunk, shards in on_ray.shards(ray_address, run, destination, waiting, num_workers, sandbox=sandbox):
                tally.add_shards(chunk, shards)
            destination.fetch()
        for source in sources:
            source.require_unchanged()
        manifest = Manifest.write(folder, run, tally.done.rows, first_row, str(destination))
        clean(destination, settings.inputs, manifest)
        tally.end()
        return manifest, left_out


def require_run(folder: RunFolder) -> None:
    """Raise InputError if a folder contains other files but no run, or if the folder cannot be listed."""
    if not (folder.path / RUN_FILE).exists():
        with os_errors_as(InputError, f"{folder} cannot be listed"):
            names = folder.names()
        own = _OF_SHARDS if any(map(SHARD_FILE.fullmatch, names)) else ()
        others = [name for name in names if not (_RUN_FILES.fullmatch(name) or name in own)]
        if others:
            raise InputError(
                f"{folder} does not contain a run, but has other files, such as {min(others)}. Choose a folder "
                "that is empty or does not exist yet"
            )


def clean(destination: RunFolder, inputs: Sequence[str], manifest: Manifest) -> None:
    """Remove the files that only an unfinished run needs, and copy the last files to the store."""
    folder = destination.path
    drop_gathered(inputs, folder)
    for left in (path for pattern in _LEFT_BY_ACTORS for path in folder.glob(pattern)):
        left.unlink(missing_ok=True)
    paths = [Path(one.table) for one in manifest.shards]
    shards = {name for path in paths for name in (path.name, path.with_suffix(".safetensors").name)}
    destination.finish(TIMINGS_FILE, ERRORS_FILE, README_FILE, MANIFEST_FILE, shards=shards)
    destination.remove(STATES_FILE)


def _part(part: str, every: Sequence[Chunk]) -> tuple[Sequence[Chunk], float]:
    """Return the chunks of a part, and their share of all chunks."""
    numbers = part_of(part, len(every))
    return every[numbers.start : numbers.stop], len(numbers) / max(1, len(every))


def _require_apart(inputs: Sequence[str], output: Path | str) -> None:
    """Raise InputError if an input is in the output folder, where the run's files might overwrite it."""
    system, folder = _place(output)
    for given in inputs:
        if is_stream(given):
            continue
        other, path = _place(given)
        if system == other and PurePosixPath(path).is_relative_to(folder):
            raise InputError(f"the input {given} is inside the output folder {output}. Choose another output folder")


def _place(given: Path | str) -> tuple[Any, str]:
    """Return the file system of a path or a URL, None for the local one, and the path there.

    URLs may name a file system differently, such as s3:// and s3a://.
    """
    if isinstance(given, Path) or not is_url(given):
        return None, os.path.realpath(given)
    with os_errors_as(InputError, f"{given} cannot be read"), as_os_errors(str(given)):
        system, path = system_of(str(given))
    return (None, os.path.realpath(path)) if "local" in system.protocol else (system, path)


def _require_free(columns: Collection[str]) -> None:
    """Raise InputError if a column that is kept has the name of a column that every table has."""
    own = [*SCHEMA.names, REQUEST, ASSISTANT]
    if taken := [name for name in columns if name in own]:
        raise InputError(
            f"keep_columns has {taken[0]}, which is the name of a column of each output table ({', '.join(own)}). "
            "Rename this column of the input"
        )


@contextmanager
def opened_folder(output: Path | str, staging: Path | None = None) -> Iterator[RunFolder]:
    """Open and lock the folder of a run. `StagedFolder.leased` and `locked_folder` list the errors."""
    if isinstance(output, Path):
        with locked_folder(output):
            yield RunFolder(output)
        return
    store, path = Store(output), staging_path(output, staging)
    with access_is_needed():
        held = holder_of(store)  # before locking, because the lock of a run on this machine does not say who holds it
    with locked_folder(path, held.refusal(output) if held else None), StagedFolder.leased(store, path) as folder:
        yield folder


@contextmanager
def locked_folder(folder: Path, refusal: InputError | None = None) -> Iterator[None]:
    """Create the folder if needed, and lock it against other runs. When the process ends, the kernel releases the lock.

    A run that fails before it begins removes the files and folders that it created. `refusal` is the error to raise if
    another run is using the folder.

    Raises:
        InputError: Another run is using the folder, or the path is not a folder that the caller may write to.
        StorageError: The file system fails.

    """
    lock = folder / LOCK_FILE
    with creating(folder, _NAME_A_FOLDER):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with os_errors_as(StorageError, f"{folder} cannot be locked"):
            if not locked(descriptor, folder) or not is_same(lock, descriptor):
                raise refusal or InputError(f"another run is using {folder}")
        try:
            yield
        finally:
            if not (folder / RUN_FILE).exists():
                lock.unlink(missing_ok=True)
                with suppress(OSError):  # the folder stays if another process has put files there
                    for path in missing:
                        path.rmdir()
    finally:
        os.close(descriptor)
