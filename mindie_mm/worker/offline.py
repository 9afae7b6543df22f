"""Offline generation. The engine answers the rows of a finished `tokenize` run in order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard import ShardRow, arena_path
from mindie_mm.batch.progress import Progress, Show
from mindie_mm.batch.same_run import model_digest, versions, weights_digest
from mindie_mm.device import LIBRARIES
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    BadReference,
    DeviceError,
    InputError,
    MindieMMError,
    NoProcess,
    ProcessDied,
    error_name,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import WorkerConfig, kind_of_name
from mindie_mm.shm import Arena
from mindie_mm.worker.answer_file import Line, Origin, Requests, continued, has_failed
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker

_log = logging.getLogger(__name__)

_ENGINE_FAILED = (ProcessDied, NoProcess, DeviceError)
_DECIDING = ("weights", "max_model_len", "vision_device", "vision_bits", "projector_device", "projector_bits")
"""Fields of `EngineConfig` that affect answers. The device and the data type are recorded later, when the engine has
selected them."""
_BACK_S = 900.0
"""Time in seconds that rows wait for a restarted engine. It is long, because loading a large model takes minutes."""


def _nowhere(done: Progress, earlier: Progress) -> None:
    """Show no progress."""


async def generate(
    dataset: Dataset,
    output: Path,
    config: WorkerConfig,
    requests: Requests,
    limit: int | None = None,
    *,
    other_model: bool = False,
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
        other_model: Whether to accept a checkpoint that differs from the checkpoint of the `tokenize` run.
        loading: Has the same meaning as in `Worker.start`.
        show: Function to call when the model is loaded, and for each row.

    Returns:
        The number of rows in `output`, and the number of errors among them.

    Raises:
        InputError: `output` belongs to another run, device or data type, the checkpoint differs from that of the run,
            or a sampling setting is invalid. Everything except the device and its data type is checked before the model
            is loaded.
        StorageError: `output` cannot be written.
        CorruptReference, SegmentMissing: A shard is damaged or missing.
        NoProcess, ProcessDied, DeviceError: The engine does not restart, or every request makes it fail.

    """
    stop, run = min(len(dataset), limit or len(dataset)), dataset.manifest.run
    checkpoint = Checkpoint.open(config.model)
    if not other_model:
        run.require_model(checkpoint)
    origin = Origin(
        run=dataset.manifest.digest,
        model="" if config.model is None else os.fsencode(config.model.absolute()).decode(errors="backslashreplace"),
        model_digest=model_digest(checkpoint),
        weights_digest=weights_digest(checkpoint),
        sampling=requests.default,
        settings=_deciding(config),
        versions=versions(LIBRARIES),
        dtype="" if config.engine.dtype == "auto" else config.engine.dtype,
    )
    with continued(output, origin) as (append, begun, earlier_errors, last_id):
        if begun > stop:
            raise InputError(f"{output} has {begun} rows, but only {stop} were requested")
        if begun and last_id != (own := dataset.record(begun - 1).id):
            raise InputError(
                f"{output} has the answers of another run: its row {begun - 1} has the id {last_id!r}, but the id "
                f"in this run is {own!r}"
            )
        errors, done = earlier_errors, begun
        if done == stop:
            return stop, errors
        async with (
            await Worker.start(config, in_process=True, loading=loading) as worker,
            aclosing(_answers(dataset, range(begun, stop), worker, requests)) as answers,
        ):
            origin.require_engine(output, worker.engine.info.device, worker.engine.info.dtype)
            earlier = Progress(begun, earlier_errors, share=begun / stop)
            show(earlier, earlier)
            try:
                async for answer in answers:
                    errors += has_failed(answer)
                    append(msgspec.json.encode(answer, enc_hook=str) + b"\n")
                    done += 1
                    show(Progress(done, errors, share=done / stop), earlier)
            except _ENGINE_FAILED as error:
                raise type(error)(f"{error}. {done} of {stop} rows were answered before the failure") from error
    return stop, errors


def _deciding(config: WorkerConfig) -> dict[str, Any]:
    """Return the settings of the engine that affect answers."""
    engine = config.engine
    deciding = {name: getattr(engine, name) for name in _DECIDING}
    deciding = {name: kind_of_name(value) if isinstance(value, str) else value for name, value in deciding.items()}
    return {"family": config.family or ""} | deciding


async def _answers(dataset: Dataset, rows: range, worker: Worker, requests: Requests) -> AsyncGenerator[Line, None]:
    """Yield the answers of `rows` in order. A shard is mounted from its first request to its last answer.

    Twice as many rows are in progress as the engine can run, so that the engine never waits for rows.

    Raises:
        CorruptReference, SegmentMissing: A shard is damaged or missing. All rows of earlier shards have been answered.

    """
    asking = _Asking(worker, requests)
    most = 2 * worker.config.engine.max_num_seqs * len(worker.engine.engines)
    with ExitStack() as mounts:
        try:
            for first_row, own in _by_shard(dataset, rows):
                try:
                    await asyncio.to_thread(dataset.shard(first_row).verify, dataset.folder)
                except BadReference:
                    while asking:
                        yield await asking.next()
                    raise
                mount = mounts.enter_context(ExitStack())
                # Create an arena of one page, so that no other process of this machine uses its number.
                number = mount.enter_context(Arena.create(1)).number
                worker.engine.mount(arena_path(dataset.folder, first_row), number)
                mount.callback(worker.engine.unmount, number)
                for row in own:
                    asking.ask(dataset.record(row), number, mount if row == own[-1] else None)
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
    number: int
    """Arena number of the mounted shard."""
    mount: ExitStack | None
    """Mount of the shard, to be closed after the answer. It is None unless the row is the last row of the shard."""
    task: asyncio.Task[None] = field(init=False)
    answer: Line | None = None
    failure: MindieMMError | None = None
    """Engine failure that left the row without an answer. The row may be the cause."""


class _Asking:
    """A queue of concurrent requests for rows. Answers are returned in order.

    If the engine fails, all unanswered rows are requested again. If it fails again, these rows are requested in halves,
    and so on. If the engine fails on a single row, the row gets an error, and the other rows are answered.
    """

    def __init__(self, worker: Worker, requests: Requests) -> None:
        self._worker = worker
        self._requests = requests
        self._asked: deque[_Asked] = deque()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, record: ShardRow, number: int, mount: ExitStack | None) -> None:
        """Request another row, whose shard is mounted as arena `number`. Close `mount` after the answer."""
        asked = _Asked(record, number, mount)
        self._begin(asked)
        self._asked.append(asked)

    async def next(self) -> Line:
        """Return the answer of the oldest row. Raise an error of `_ENGINE_FAILED` if no request can be answered."""
        oldest = self._asked[0]
        await oldest.task
        if oldest.answer is None:
            await asyncio.gather(*(asked.task for asked in self._asked))
            failed = [asked for asked in self._asked if asked.answer is None]
            _log.warning("%s. %d unfinished rows are requested again", oldest.failure, len(failed))
            await self._ask_again(failed)
        self._asked.popleft()
        if oldest.mount is not None:
            oldest.mount.close()
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
        if record.prompt is None:
            asked.answer = self._requests.error_line(record, _reason(record.error))
            return
        try:
            prompt = record.mounted_prompt(asked.number)
            source = PromptSource(prompt, deaths=0)  # another attempt would hide a row that kills the engine
            params = self._requests.params(record)
            answer = await Answer.of(self._worker.generate(source, params, str(record.row)))
        except _ENGINE_FAILED as error:
            asked.failure = error
        except MindieMMError as error:
            asked.answer = self._requests.error_line(record, _reason(error))
        else:
            asked.answer = self._requests.line(record, answer)

    async def _ask_again(self, rows: Sequence[_Asked]) -> None:
        """Request `rows` again until each row has an answer. No other request may run during this call."""
        await self._worker.engine.wait_until_up(_BACK_S)
        for asked in rows:
            self._begin(asked)
        await asyncio.gather(*(asked.task for asked in rows))
        failed = [asked for asked in rows if asked.answer is None]
        if len(rows) == 1 and failed:
            await self._require_answering()
            rows[0].answer = self._requests.error_line(rows[0].record, _reason(rows[0].failure))
        elif failed:
            half = len(failed) // 2
            for part in filter(None, (failed[:half], failed[half:])):
                await self._ask_again(part)

    async def _require_answering(self) -> None:
        """Raise an error of `_ENGINE_FAILED` if even a trivial request makes the engine fail."""
        engine = self._worker.engine
        await engine.wait_until_up(_BACK_S)
        one = SamplingParams(max_tokens=1)
        try:
            async with aclosing(engine.generate("anything", np.zeros(1, np.int64), one)) as steps:
                async for _ in steps:
                    pass
        except _ENGINE_FAILED:
            raise
        except MindieMMError:
            return  # an error of the request shows that the engine works


def _reason(error: MindieMMError | str | None) -> str:
    return f"{error_name(error)}: {error}" if isinstance(error, MindieMMError) else str(error)


def _by_shard(dataset: Dataset, rows: range) -> Iterator[tuple[int, range]]:
    """Yield the first row of each shard, and the part of `rows` in this shard."""
    for shard in dataset.manifest.shards:
        own = range(max(rows.start, shard.info.first_row), min(rows.stop, shard.info.stop_row))
        if own:
            yield shard.info.first_row, own
