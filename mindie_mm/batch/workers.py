"""Runs the worker processes of a run on this machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from itertools import chain

import msgspec

from mindie_mm.batch.batch_messages import SANDBOX, Finished, Job, Ready, Report, Steps
from mindie_mm.batch.cursor import RowCursor
from mindie_mm.batch.deaths import Deaths
from mindie_mm.batch.input.source import Chunk
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.progress import Progress
from mindie_mm.batch.tally import Tally
from mindie_mm.errors import ProcessDied, StorageError, os_errors_as
from mindie_mm.processes.ipc import Child, Failure
from mindie_mm.processes.tasks import gather
from mindie_mm.settings.cgroup import available_cpus

_log = logging.getLogger(__name__)

_MODULE = "mindie_mm.batch.batch_process"
TIMINGS_FILE = "timings.jsonl"


class Workers:
    """Runs processes that tokenize the `chunks` that no earlier call has finished, and write shards to `folder`.

    With `sandbox`, each process has a sandboxed decoder process.
    """

    def __init__(self, folder: RunFolder, chunks: Iterator[Chunk], tally: Tally, *, sandbox: bool = False) -> None:
        self._arguments = [SANDBOX] if sandbox else []
        self._folder = folder.path
        self._address = msgspec.json.encode(folder.address).decode()
        self._chunks = chunks
        self._tally = tally
        self._deaths = Deaths(note=". When the worker exited the second time, it was processing only this row")
        self._set_aside: list[Chunk] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Report)

    async def run(self, num_workers: int | None) -> None:
        """Run `num_workers` processes until all chunks are done. None means one process per available CPU.

        Raises:
            ProcessDied: A worker died before it was ready, or at a row that should have been skipped.
            StorageError: A shard cannot be written.
            TooManyErrors: More rows failed than the run allows.

        """
        try:
            await gather([self._worker(self._chunks) for _ in range(num_workers or available_cpus())])
            # The chunks of workers that died are repeated one by one, so that the memory use of other workers cannot
            # cause another death.
            while self._set_aside:
                again, self._set_aside = self._set_aside, []
                await self._worker(chain(again, self._chunks), alone=True)
        finally:
            for left in self._folder.glob("shard-*.partial"):  # all workers have ended
                left.unlink(missing_ok=True)

    async def _next(self, every: Iterator[Chunk]) -> Chunk | None:
        """Return the next chunk that is not done, or None after the last chunk."""
        for chunk in every:
            if not self._tally.is_done(chunk):
                return chunk
            await asyncio.sleep(0)  # there may be many finished chunks, and an interrupt must be handled between them
        return None

    async def _worker(self, every: Iterator[Chunk], *, alone: bool = False) -> None:
        """Run one process after another until no chunks are left. If there are no chunks, start no process.

        A process that is killed before it is ready is not replaced, and its chunk is repeated later. If no other
        process is running (`alone`), raise ProcessDied instead.
        """
        while (chunk := await self._next(every)) is not None:
            with RowCursor.create() as cursor:
                child = await Child.start(_MODULE, self._address, cursor.path, *self._arguments)
                try:
                    if ready := isinstance(await self._report(child), Ready):
                        while chunk is not None and await self._finish(child, cursor, chunk):
                            chunk = await self._next(every)
                finally:
                    await child.close()
            if chunk is not None:
                self._set_aside.append(chunk)
            if not ready:
                how = f"a worker exited with {_ended_with(child.status)} before it was ready"
                if alone or child.status is None or child.status >= 0:
                    raise ProcessDied(how)
                _log.warning("%s; the run continues with one fewer worker", how)
                return

    async def _report(self, child: Child) -> Report | None:
        """Return the worker's next report, or None if the worker died. If the report is a Failure, raise its error."""
        try:
            report: Report = self._decoder.decode(await child.channel.recv())
        except EOFError:
            return None
        if isinstance(report, Failure):
            raise report.exception()
        return report

    async def _finish(self, child: Child, cursor: RowCursor, chunk: Chunk) -> bool:
        """Let the worker process a chunk. Return False if the worker died before the chunk was finished."""
        began, done = time.monotonic(), Progress()
        cursor.move_to(chunk.first_row)
        child.channel.send(self._encoder.encode(Job(chunk, self._deaths.errors(chunk))))
        while isinstance(report := await self._report(child), Steps):
            for step in report.steps:
                done += self._tally.add_step(chunk, step)
        if isinstance(report, Finished):
            self._write_timing(chunk, time.monotonic() - began, child.pid)
            return True
        await child.close()
        self._tally.take_back(done)
        row, how = cursor.row, _ended_with(child.status)
        _log.warning("a worker exited with %s at row %d", how, row)
        self._deaths.add(row, how)
        return False

    def _write_timing(self, chunk: Chunk, seconds: float, pid: int) -> None:
        """Append the duration to a separate file, because all other files must be the same in every run.

        Raises:
            StorageError: The file cannot be written.

        """
        line = {"first_row": chunk.first_row, "rows": chunk.num_rows, "seconds": round(seconds, 4), "worker": pid}
        path = self._folder / TIMINGS_FILE
        with os_errors_as(StorageError, f"{path} cannot be written"), path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _ended_with(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
