"""Offline generation. The engine answers the rows of a finished `tokenize` run in order."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard_row import ShardRow
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
    StorageError,
    error_name,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes.tasks import in_thread
from mindie_mm.settings.config import WorkerConfig, kind_of_name
from mindie_mm.shm import Arena, Block
from mindie_mm.tokenize.prompt import Prompt, put_words
from mindie_mm.worker.answer_file import EarlierAnswers, Line, Origin, Requests, continued, has_failed
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker

_log = logging.getLogger(__name__)

_ENGINE_FAILED = (ProcessDied, NoProcess, DeviceError)
_DECIDING = ("weights", "max_model_len", "vision_device", "vision_bits", "projector_device", "projector_bits")
"""Fields of `EngineConfig` that affect answers. The device and the data type are recorded later, when the engine has
selected them."""
_TOKENIZER_ARENA_BYTES = 1 << 20
"""Size of the arena of the worker's tokenizer, which tokenizes nothing."""
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
        StorageError: `output` cannot be written, or the store of the run fails.
        CorruptReference: A shard is damaged or missing.
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
        async with (
            await Worker.start(
                replace(config, arena_bytes=_TOKENIZER_ARENA_BYTES), in_process=True, loading=loading
            ) as worker,
            aclosing(_answers(dataset, range(begun, stop), given, worker, requests, config.arena_bytes)) as answers,
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
        given.path.unlink(missing_ok=True)
    return stop, errors


def _deciding(config: WorkerConfig) -> dict[str, Any]:
    """Return the settings of the engine that affect answers."""
    engine = config.engine
    deciding = {name: getattr(engine, name) for name in _DECIDING}
    deciding = {name: kind_of_name(value) if isinstance(value, str) else value for name, value in deciding.items()}
    return {"family": config.family or ""} | deciding


async def _answers(
    dataset: Dataset, rows: range, earlier: EarlierAnswers, worker: Worker, requests: Requests, arena_bytes: int
) -> AsyncGenerator[Line, None]:
    """Yield the answers of `rows` in order. A shard is verified before its first row. Earlier answers are repeated.

    Twice as many rows are in progress as the engine can run, so that the engine never waits for rows.

    Raises:
        CorruptReference: A shard is damaged or missing. All rows of earlier shards have been answered.
        StorageError: The store of the run fails.

    """
    most = 2 * worker.config.engine.max_num_seqs * len(worker.engine.engines)
    largest = max(shard.info.max_row_bytes for shard in dataset.manifest.shards)
    # Twice the size of the largest row leaves room for the headers and the size classes of its blocks.
    with Arena.create(max(arena_bytes, 2 * largest)) as arena:
        asking, kept = _Asking(dataset, arena, worker, requests), earlier.lines(rows.start)
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

    def __init__(self, dataset: Dataset, arena: Arena, worker: Worker, requests: Requests) -> None:
        self._dataset = dataset
        self._arena = arena
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
            asked.answer = self._requests.error_line(record, _reason(record.error))
            return
        copy = partial(self._copied, record)
        prompt = await copy()  # if the arrays cannot be read, the run ends
        try:
            # another attempt after the death of an engine would hide a row that kills the engine
            source = PromptSource(prompt, copy, deaths=0)
            params = self._requests.params(record)
            answer = await Answer.of(self._worker.generate(source, params, str(record.row)))
        except _ENGINE_FAILED as error:
            asked.failure = error
        except MindieMMError as error:
            asked.answer = self._requests.error_line(record, _reason(error))
        else:
            asked.answer = self._requests.line(record, answer)

    async def _copied(self, record: ShardRow) -> Prompt:
        """Copy the row's arrays to the arena, and return its prompt with handle words. Wait while the arena is full."""
        specs = self._dataset.specs(record)
        if not specs:
            return record.prompt
        # Arrays are read after the allocation, so that the arena limits how many rows of a store are in memory.
        blocks = await self._arena.allocate_together(specs, path_file=None, timeout_s=math.inf)
        try:
            await in_thread(partial(_fill, blocks, self._dataset, record))
            words = [
                block.publish(digest).to_words() for block, digest in zip(blocks, record.digests or (), strict=True)
            ]
        except BaseException:
            for block in blocks:
                self._arena.discard(block)
            raise
        return put_words(record.prompt, words)

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


def _fill(blocks: Sequence[Block], dataset: Dataset, record: ShardRow) -> None:
    for block, arrays in zip(blocks, dataset.arrays(record), strict=True):
        for name, array in arrays.items():
            block[name][...] = array


def _reason(error: MindieMMError | str | None) -> str:
    return f"{error_name(error)}: {error}" if isinstance(error, MindieMMError) else str(error)


def _by_shard(dataset: Dataset, rows: range) -> Iterator[tuple[int, range]]:
    """Yield the first row of each shard, and the part of `rows` in this shard."""
    for shard in dataset.manifest.shards:
        own = range(max(rows.start, shard.info.first_row), min(rows.stop, shard.info.stop_row))
        if own:
            yield shard.info.first_row, own
