"""A run: what is done already left alone, the rest handed to workers here or on a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mindie_mm.batch.files import locked
from mindie_mm.batch.gather import drop_gathered, gather
from mindie_mm.batch.manifest import Manifest, drop_changed
from mindie_mm.batch.progress import Show
from mindie_mm.batch.settings import RUN_FILE, Run, Settings, require_run
from mindie_mm.batch.source import chunks
from mindie_mm.batch.tally import Tally
from mindie_mm.batch.workers import Workers
from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.paths import absolute
from mindie_mm.shm.life import is_same

LOCK_FILE = ".lock"
_LEFT_BY_ACTORS = ("at-*.json", "input-*.partial")
"""Files that killed actors of Ray leave in a node's folder, which may be copied into the run's."""


def run_batch(
    settings: Settings,
    folder: Path,
    *,
    num_workers: int | None = None,
    max_errors: int | None = None,
    show: Show = lambda *_: None,
    ray_address: str | None = None,
) -> tuple[Manifest, Counter[str]]:
    """Does what of a run of `settings` into `folder` is not done yet, and writes the manifest.

    Beside the manifest, how many files of the input's folders are no media, by the ending of their names.

    `num_workers`: processes here, or actors on the Ray cluster at `ray_address` ("local": one of this machine); None:
    as many as there are cores. `max_errors`: rows that may fail before the run stops; None: any number.
    InputError if the folder holds another run or the input cannot be read, StorageError if the output cannot be
    written, ProcessDied, TooManyErrors. Whatever ends it, running it again goes on from there.
    """
    if num_workers is not None and num_workers < 1:
        raise InputError(f"{num_workers} workers; it takes at least 1")
    folder = absolute(folder)
    with _locked(folder):
        require_run(folder)
        with ExitStack() as refused:
            refused.callback(drop_gathered, settings.inputs, folder)
            left_out = gather(settings.inputs, folder, settings.template, sys.stdin.buffer, settings.limit)
            sources = settings.sources(folder)
            for source in sources:
                source.check()
            run = Run.of(settings, folder)
            run.begin(folder)
            refused.pop_all()
        drop_changed(folder, run)
        tally = Tally(run, folder, sources, max_errors, show)
        every = chunks(sources, settings.shard_rows, settings.limit)
        if ray_address is None:
            asyncio.run(Workers(folder, every, tally).run(num_workers))
        else:
            from mindie_mm.batch import on_ray  # late: it is an extra, and takes seconds to import

            waiting = [chunk for chunk in every if not tally.is_done(chunk)]
            for chunk, shards in on_ray.shards(ray_address, run, folder, waiting, num_workers):
                tally.add_shards(chunk, shards)
        manifest = Manifest.write(folder, run, tally.done.rows)
        drop_gathered(settings.inputs, folder)
        for left in (path for pattern in _LEFT_BY_ACTORS for path in folder.glob(pattern)):
            left.unlink(missing_ok=True)
        tally.end()
        return manifest, left_out


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it against other runs. The kernel releases the lock however the run ends.

    A run that fails before it begins removes the files and folders that it created.

    Raises:
        InputError: Another run is using the folder.
        StorageError: The folder cannot be written to.

    """
    lock = folder / LOCK_FILE
    with os_errors_as(StorageError, f"{folder} cannot be written to"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with os_errors_as(StorageError, f"{folder} cannot be locked"):
            if not locked(descriptor, folder) or not is_same(lock, descriptor):
                raise InputError(f"another run is using {folder}")
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
