"""A run: chunks handed to workers, what is done already left alone, deaths survived."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import msgspec

from mindie_mm.batch.gather import drop_gathered, gather
from mindie_mm.batch.manifest import Manifest, drop_changed
from mindie_mm.batch.messages import Finished, Job, Ready, Report, Steps, death_error
from mindie_mm.batch.place import Place
from mindie_mm.batch.progress import Progress, Show
from mindie_mm.batch.settings import Run, Settings, require_run
from mindie_mm.batch.shard import ShardInfo, complete_shards
from mindie_mm.batch.source import Chunk, Source, chunks
from mindie_mm.errors import InputError, ProcessDied, StorageError, TooManyErrors
from mindie_mm.ipc import Child, Failure

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.batch.process"
LOCK_FILE = ".lock"
TIMINGS_FILE = "timings.jsonl"
_OF_KILLED_ACTORS = ("at-*.json", "input-*.partial")
"""What they leave, in the folder or in what is copied into it."""


@dataclass(slots=True)
class _Suspects:
    """Rows at which workers died."""

    deaths: dict[int, int] = field(default_factory=dict)
    """By row."""
    doomed: dict[int, str] = field(default_factory=dict)
    """Rows that are not tried again."""

    def blame(self, row: int, status: int | None) -> None:
        """ProcessDied at a third death: the row was not tried any more."""
        how = _ended_with(status)
        _log.warning("a worker ended with %s at row %d", how, row)
        if row in self.doomed:
            raise ProcessDied(f"a worker ended with {how} at row {row} again, though that row was left out")
        self.deaths[row] = self.deaths.get(row, 0) + 1
        if self.deaths[row] > 1:
            self.doomed[row] = f"{death_error(how)}, the second time alone"


def _ended_with(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"


class BatchRun:
    """One run of `settings` into `folder`."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        num_workers: int | None = None,
        max_errors: int | None = None,
        show: Show = lambda *_: None,
        ray_address: str | None = None,
    ) -> None:
        """`max_errors`: rows that may fail before the run stops; None: any number.

        `num_workers`: processes here, or actors on the Ray cluster at `ray_address` ("local": one of this machine);
        None: as many as there are cores. InputError.
        """
        if num_workers is not None and num_workers < 1:
            raise InputError(f"{num_workers} workers; it takes at least 1")
        self._settings = settings
        self._folder = folder
        self._num_workers = num_workers
        self._max_errors = max_errors
        self._show = show
        self._ray_address = ray_address
        self._done = self._earlier = Progress()
        self._digest = ""
        self._shares: list[float] = []
        self._suspects = _Suspects()
        self._set_aside: list[Chunk] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Report)

    def run(self) -> Manifest:
        """Does what is not done yet, and writes the manifest.

        InputError if the folder holds another run or the input cannot be read, StorageError if the output cannot be
        written, TooManyErrors. Whatever ends it, running it again goes on from there.
        """
        settings, folder = self._settings, self._folder
        with _locked(folder):
            require_run(folder)
            gather(settings.inputs, folder, settings.template, sys.stdin.buffer)
            run = Run.of(settings, folder)
            run.begin(folder)
            drop_changed(folder, run)
            self._digest = run.digest
            sources = settings.sources(folder)
            self._shares = _shares(sources)
            every = chunks(sources, settings.shard_rows, settings.limit)
            if self._ray_address is None:
                asyncio.run(self._work(every))
            else:
                self._work_on_ray(run, [chunk for chunk in every if not self._is_done(chunk)])
            manifest = Manifest.write(folder, run, self._done.rows)
            drop_gathered(settings.inputs, folder)
            for left in (path for pattern in _OF_KILLED_ACTORS for path in folder.glob(pattern)):
                left.unlink(missing_ok=True)
            # Of a file a little may be in no row, such as what a tar ends with.
            self._show(replace(self._done, share=1.0), self._earlier)
            return manifest

    def _is_done(self, chunk: Chunk) -> bool:
        """Whether an earlier run did a chunk; counts it then."""
        shards = complete_shards(self._folder, chunk, self._digest)
        if shards is None:
            return False
        before = self._done
        self._count_shards(chunk, shards)
        self._earlier += self._done - before
        return True

    async def _next(self, every: Iterator[Chunk]) -> Chunk | None:
        """The next chunk that is not done; None behind the last one."""
        for chunk in every:
            if not self._is_done(chunk):
                return chunk
            await asyncio.sleep(0)  # many may be done: an interrupt comes through here
        return None

    def _share(self, chunk: Chunk, rows: int) -> float:
        """Of the whole input, so many rows of a chunk."""
        return self._shares[chunk.file] * (chunk.stop - chunk.start) * rows / chunk.num_rows

    def _count(self, more: Progress) -> None:
        self._done += more
        self._show(self._of_limit(self._done), self._of_limit(self._earlier))

    def _of_limit(self, done: Progress) -> Progress:
        """With what is done of the rows that are taken, where that is more than what is done of the input."""
        limit = self._settings.limit
        return done if limit is None else replace(done, share=max(done.share, done.rows / limit))

    def _count_shards(self, chunk: Chunk, shards: Sequence[ShardInfo]) -> None:
        for shard in shards:
            share = self._share(chunk, shard.num_rows)
            self._count(Progress(shard.num_rows, shard.num_errors, shard.num_bytes, share))

    def _require_few_errors(self, why: str) -> None:
        if self._max_errors is not None and self._done.errors > self._max_errors:
            raise TooManyErrors(f"{why} (rows that failed: {self._done.errors}, the limit is {self._max_errors})")

    def _work_on_ray(self, run: Run, waiting: Sequence[Chunk]) -> None:
        from mindie_mm.batch import on_ray  # late: it is an extra, and takes seconds to import

        assert self._ray_address is not None
        for chunk, shards in on_ray.shards(self._ray_address, run, self._folder, waiting, self._num_workers):
            self._count_shards(chunk, shards)
            self._require_few_errors(f"rows {chunk.first_row} to {chunk.stop_row - 1}")

    async def _work(self, every: Iterator[Chunk]) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._num_workers or len(os.sched_getaffinity(0))):
                    workers.create_task(self._worker(every))
            # Alone, so that what another worker took cannot be what ends it again.
            while self._set_aside:
                again, self._set_aside = self._set_aside, []
                await self._worker(chain(again, every), alone=True)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for left in self._folder.glob("shard-*.partial"):  # of workers, which have all ended
                left.unlink(missing_ok=True)

    async def _worker(self, every: Iterator[Chunk], *, alone: bool = False) -> None:
        """One process after another, until nothing waits; none where nothing does.

        One that is killed before it is ready is the last: what it took is left to the others. `alone`, ProcessDied.
        """
        while (chunk := await self._next(every)) is not None:
            with Place.create() as place:
                child = await Child.start(_MODULE, str(self._folder), place.path)
                try:
                    if ready := isinstance(await self._report(child), Ready):
                        while chunk is not None and await self._finish(child, place, chunk):
                            chunk = await self._next(every)
                finally:
                    await child.end()
            if chunk is not None:
                self._set_aside.append(chunk)
            if not ready:
                how = f"a worker ended with {_ended_with(child.status)} before it was ready"
                if alone or child.status is None or child.status >= 0:
                    raise ProcessDied(how)
                _log.warning("%s: the run goes on with one less", how)
                return

    async def _report(self, child: Child) -> Report | None:
        """The worker's next one; None if it died."""
        try:
            report: Report = self._decoder.decode(await child.channel.recv())
        except EOFError:
            return None
        if isinstance(report, Failure):
            raise report.exception()
        return report

    async def _finish(self, child: Child, place: Place, chunk: Chunk) -> bool:
        """Has the worker do a chunk; False if it died in the midst of it."""
        began, done = time.monotonic(), Progress()
        doomed = {row: why for row, why in self._suspects.doomed.items() if chunk.first_row <= row < chunk.stop_row}
        place.put(chunk.first_row)
        child.channel.send(self._encoder.encode(Job(chunk, doomed)))
        while isinstance(report := await self._report(child), Steps):
            for step in report.steps:
                more = Progress(1, step.error is not None, step.num_bytes, self._share(chunk, 1))
                done += more
                self._count(more)
                if step.error is not None:
                    self._require_few_errors(f"row {step.row}: {step.error}")
        if isinstance(report, Finished):
            self._write_timing(chunk, time.monotonic() - began, child.pid)
            return True
        await child.end()
        self._count(Progress() - done)
        self._suspects.blame(place.row, child.status)
        return False

    def _write_timing(self, chunk: Chunk, seconds: float, pid: int) -> None:
        """Apart from what must be equal from run to run. StorageError."""
        line = {"first_row": chunk.first_row, "rows": chunk.num_rows, "seconds": round(seconds, 4), "worker": pid}
        path = self._folder / TIMINGS_FILE
        try:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _shares(sources: Sequence[Source]) -> list[float]:
    """Of the whole input, a unit of each source's own size."""
    sizes = [source.path.stat().st_size for source in sources]
    return [size / max(1, sum(sizes)) / max(1, source.size) for size, source in zip(sizes, sources, strict=True)]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder if there is none, and keeps other runs out; the kernel lets go of it, however the run ends.

    InputError while another run works in it, StorageError if it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another run works in {folder}") from None
        yield
    finally:
        os.close(descriptor)
