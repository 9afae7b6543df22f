"""Offline generation. Engines answer the rows of a finished `tokenize` run, in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.progress import Progress, Show
from mindie_mm.errors import BadReference, InputError, MindieMMError, StorageError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.worker.answer_file import EarlierAnswers, Line, Origin, Requests, continued, has_failed
from mindie_mm.worker.rows import ENGINE_FAILED, RowWorker, reason, row_worker
from mindie_mm.worker.rows_on_ray import RayWorkers, ray_workers

_log = logging.getLogger(__name__)

_BACK_S = 900.0
"""Time in seconds that rows wait for a restarted engine. It is long, because loading a large model takes minutes."""
_ROWS_PER_SEQUENCE = 2
"""Number of rows in progress for each request that an engine can run, so that the engine never waits for rows."""


def _nowhere(done: Progress, earlier: Progress) -> None:
    """Show no progress."""


async def generate(
    dataset: Dataset,
    output: Path,
    config: WorkerConfig,
    requests: Requests,
    limit: int | None = None,
    *,
    ray: str | None = None,
    other_model: bool = False,
    retry_errors: bool = False,
    loading: Callable[[float], object] | None = None,
    show: Show = _nowhere,
) -> tuple[int, int]:
    """Append the answers that are missing in `output`.

    This function raises the same errors as `Worker.start`, and the errors below.

    Args:
        dataset: Rows of a finished `tokenize` run.
        output: File of answers, one JSON object per line.
        config: Settings of the worker.
        requests: Sampling settings of the rows, and the form of their answers.
        limit: Number of rows to answer, counted from the first row, or None for all rows.
        ray: Address of the Ray cluster whose machines run the engines, as in `join`. None means this machine.
        other_model: Whether to accept a checkpoint that differs from the checkpoint of the `tokenize` run.
        retry_errors: Whether to ask rows again whose line in `output` has an error. Other lines are kept.
        loading: Has the same meaning as in `Worker.start`.
        show: Function to call when the model is loaded, and for each row.

    Returns:
        The number of rows in `output`, and the number of errors among them.

    Raises:
        InputError: `output` belongs to another run, device or data type, the checkpoint differs from that of the run,
            or a sampling setting is invalid. Everything except the device and its data type is checked before the model
            is loaded.
        StorageError: `output` cannot be written.
        CorruptReference: A shard is damaged or missing.
        NoProcess, ProcessDied, DeviceError: The engine does not restart, or every request makes it fail.

    """
    stop, run = min(len(dataset), limit or len(dataset)), dataset.manifest.run
    if not other_model:
        run.require_model(Checkpoint.open(config.model))
    origin = Origin.of(dataset, config, requests.default)
    with continued(output, origin, stop, retry_errors=retry_errors) as (append, begun, earlier_errors, last_id):
        given = EarlierAnswers(output)
        if begun and last_id is not None and last_id != (own := dataset.record(begun - 1).id):
            raise InputError(
                f"{output} has the answers of another run: its row {begun - 1} has the id {last_id!r}, but the id "
                f"in this run is {own!r}"
            )
        errors, done = earlier_errors, begun
        if done == stop:
            return stop, errors
        workers: AbstractAsyncContextManager[RowWorker | RayWorkers]
        if ray is None:
            workers = row_worker(dataset, config, requests, loading)
        else:
            workers = ray_workers(ray, dataset, config, requests, origin)
        async with workers as worker:
            origin.require_engine(output, worker.info.device, worker.info.dtype)
            most = _ROWS_PER_SEQUENCE * config.engine.max_num_seqs * worker.num_engines
            answers = _answers(dataset, range(begun, stop), given, worker, requests, most)
            earlier = Progress(begun, earlier_errors, share=begun / stop)
            show(earlier, earlier)
            try:
                async with aclosing(answers):
                    async for answer in answers:
                        errors += has_failed(answer)
                        append(msgspec.json.encode(answer, enc_hook=str) + b"\n")
                        done += 1
                        show(Progress(done, errors, share=done / stop), earlier)
            except ENGINE_FAILED as error:
                raise type(error)(f"{error}. {done} of {stop} rows were answered before the failure") from error
        given.path.unlink(missing_ok=True)
    return stop, errors


async def _answers(
    dataset: Dataset,
    rows: range,
    earlier: EarlierAnswers,
    worker: RowWorker | RayWorkers,
    requests: Requests,
    most: int,
) -> AsyncGenerator[Line, None]:
    """Yield the answers of `rows` in order. A shard is verified before its first row. Earlier answers are repeated.

    At most `most` rows are in progress or have an answer that waits for an earlier row.

    Raises:
        CorruptReference: A shard is damaged or missing. All rows of earlier shards have been answered.
        StorageError: The store of the run fails.

    """
    asking, kept = _Asking(worker, requests), earlier.lines(rows.start)
    try:
        for first_row, own in _by_shard(dataset, rows):
            try:
                await asyncio.to_thread(dataset.verify, first_row)
            except (BadReference, StorageError):
                while asking:
                    yield await asking.next()
                raise
            for row in own:
                line = next(kept, None)
                asking.ask(dataset.record(row), None if line is None or has_failed(line) else line)
                if len(asking) == most:
                    yield await asking.next()
        while asking:
            yield await asking.next()
    finally:
        await asking.close()


@dataclass(slots=True, eq=False)
class _Asked:
    """A row in progress."""

    record: ShardRow
    answer: Line | None = None
    task: asyncio.Task[None] = field(init=False)
    failure: MindieMMError | None = None
    """Engine failure that left the row without an answer. The row may be the cause."""


class _Asking:
    """A queue of concurrent requests for rows. Answers are returned in order.

    If the engine fails, all unanswered rows are requested again. If it fails again, these rows are requested in halves,
    and so on. If the engine fails on a single row, the row gets an error, and the other rows are answered.
    """

    def __init__(self, worker: RowWorker | RayWorkers, requests: Requests) -> None:
        self._worker = worker
        self._requests = requests
        self._asked: deque[_Asked] = deque()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, record: ShardRow, answer: Line | None = None) -> None:
        """Request another row, unless its `answer` is known."""
        asked = _Asked(record, answer)
        self._begin(asked)
        self._asked.append(asked)

    async def next(self) -> Line:
        """Return the answer of the oldest row.

        Raises:
            ProcessDied, NoProcess, DeviceError: No request can be answered.
            CorruptReference, StorageError: The row's arrays cannot be read.

        """
        oldest = self._asked[0]
        await oldest.task
        if oldest.answer is None:
            await asyncio.gather(*(asked.task for asked in self._asked))
            failed = [asked for asked in self._asked if asked.answer is None]
            _log.warning("%s. %d unfinished rows are requested again", oldest.failure, len(failed))
            await self._ask_again(failed)
        self._asked.popleft()
        assert oldest.answer is not None
        return oldest.answer

    async def close(self) -> None:
        """Cancel the requests of unanswered rows."""
        tasks = [asked.task for asked in self._asked]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, asked: _Asked) -> None:
        asked.task = asyncio.create_task(self._answer(asked))

    async def _answer(self, asked: _Asked) -> None:
        record = asked.record
        if asked.answer is not None:
            return
        if record.error is not None:
            asked.answer = self._requests.error_line(record, record.error)
            return
        try:
            asked.answer = await self._worker.answer(record)
        except ENGINE_FAILED as error:
            asked.failure = error

    async def _ask_again(self, rows: Sequence[_Asked]) -> None:
        """Request `rows` again until each row has an answer. No other request may run during this call."""
        await self._worker.wait_until_up(_BACK_S)
        for asked in rows:
            self._begin(asked)
        await asyncio.gather(*(asked.task for asked in rows))
        failed = [asked for asked in rows if asked.answer is None]
        if len(rows) == 1 and failed:
            await self._worker.wait_until_up(_BACK_S)
            await self._worker.require_answering()
            failure = rows[0].failure
            assert failure is not None
            rows[0].answer = self._requests.error_line(rows[0].record, reason(failure))
        elif failed:
            half = len(failed) // 2
            for part in filter(None, (failed[:half], failed[half:])):
                await self._ask_again(part)


def _by_shard(dataset: Dataset, rows: range) -> Iterator[tuple[int, range]]:
    """Yield the first row of each shard, and the part of `rows` in this shard."""
    for shard in dataset.manifest.shards:
        own = range(max(rows.start, shard.info.first_row), min(rows.stop, shard.info.stop_row))
        if own:
            yield shard.info.first_row, own
