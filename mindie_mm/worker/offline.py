"""A finished run of `tokenize` through the engine, shard after shard, answers in the order of rows."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.batch import Dataset
from mindie_mm.batch.checkpoint_digest import model_digest, weights_digest
from mindie_mm.batch.output.shard import ShardRow, arena_path
from mindie_mm.batch.versions import versions
from mindie_mm.device import LIBRARIES
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    BadReference,
    DeviceError,
    InputError,
    MindieMMError,
    ProcessDied,
    error_name,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import Arena
from mindie_mm.worker.answer_file import Origin, continued
from mindie_mm.worker.worker import Answer, Worker

_log = logging.getLogger(__name__)

Line = dict[str, Any]
"""An answer as it is written."""

_ENGINE_FAILED = (ProcessDied, DeviceError)
_DECIDING = ("dtype", "max_model_len", "vision_device", "vision_bits", "projector_device", "projector_bits")
"""Fields of `EngineConfig` that change answers. The device is recorded once the engine has chosen it."""
_BACK_S = 900.0
"""How long rows wait for an engine that is started again: no client does, and a large model is loaded for minutes."""


async def generate(
    dataset: Dataset,
    output: Path,
    config: WorkerConfig,
    params: SamplingParams,
    limit: int | None = None,
    *,
    other_model: bool = False,
) -> tuple[int, int]:
    """Appends the answers of rows that `output` does not have yet; how many rows it has then, and errors among them.

    InputError if `output` is not this run's, or, without `other_model`, its rows are not of `config`'s checkpoint, or
    for a setting in `params` that is none, before the model is loaded;
    StorageError if it cannot be written, CorruptReference, SegmentMissing if a shard is not what the run wrote;
    ProcessDied, DeviceError if the engine does not come back, or answers nothing; errors as Worker.start.
    """
    params = params.check(math.inf)
    stop, run = min(len(dataset), limit or len(dataset)), dataset.manifest.run
    checkpoint = Checkpoint.open(config.model)
    if not other_model:
        run.require_model(checkpoint)
    origin = Origin(
        run=dataset.manifest.digest,
        model="" if config.model is None else os.fsencode(config.model.absolute()).decode(errors="backslashreplace"),
        model_digest=model_digest(checkpoint),
        weights_digest=weights_digest(checkpoint),
        sampling=params,
        settings=_deciding(config),
        versions=versions(LIBRARIES),
    )
    with continued(output, origin) as (append, begun, earlier_errors, last_id):
        if begun > stop:
            raise InputError(f"{output} has {begun} rows; {stop} are asked for")
        if begun and last_id != (own := dataset.record(begun - 1).id):
            raise InputError(f"{output} answers another run: its row {begun - 1} is {last_id!r}, this run's {own!r}")
        errors, done = earlier_errors, begun
        if done == stop:
            return stop, errors
        async with (
            await Worker.start(config, in_process=True) as worker,
            aclosing(_answers(dataset, range(begun, stop), worker, params)) as answers,
        ):
            origin.require_device(output, worker.engine.info.device)
            try:
                async for answer in answers:
                    errors += "error" in answer
                    append(msgspec.json.encode(answer) + b"\n")
                    done += 1
            except _ENGINE_FAILED as error:
                raise type(error)(f"{error}. {done} of {stop} rows are answered") from error
    return stop, errors


def _deciding(config: WorkerConfig) -> dict[str, Any]:
    """Return the settings of the engine that change answers."""
    engine = config.engine
    return {"family": config.family or ""} | {name: getattr(engine, name) for name in _DECIDING}


async def _answers(dataset: Dataset, rows: range, worker: Worker, params: SamplingParams) -> AsyncGenerator[Line, None]:
    """As many rows at a time as the engine runs, and as many again that wait; a shard is mounted while they are asked.

    CorruptReference, SegmentMissing for a shard that is not what the run wrote, once the rows before it are answered.
    """
    asking = _Asking(worker, params)
    most = 2 * worker.config.engine.max_num_seqs
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
                # An arena of one page reserves a number that no other process of this machine takes.
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
    """A row on its way."""

    record: ShardRow
    number: int
    """Number under which its shard's arena is mounted."""
    mount: ExitStack | None
    """Closed behind the row's answer: its shard's arena, where the row is the shard's last."""
    task: asyncio.Task[None] = field(init=False)
    answer: Line | None = None
    failure: MindieMMError | None = None
    """Why the task has brought no answer: the engine failed under it, and maybe because of it."""


class _Asking:
    """Rows that are asked at the same time, and answered in their order.

    Rows under which the engine fails are asked again: all of them, then half of them at a time, and so on. One that is
    left, and fails alone, is an error; the others are answered.
    """

    def __init__(self, worker: Worker, params: SamplingParams) -> None:
        self._worker = worker
        self._params = params
        self._asked: deque[_Asked] = deque()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, record: ShardRow, number: int, mount: ExitStack | None) -> None:
        """A further row, of the shard that is mounted as `number`; `mount` is closed with its answer."""
        asked = _Asked(record, number, mount)
        self._begin(asked)
        self._asked.append(asked)

    async def next(self) -> Line:
        """The oldest row's. ProcessDied, DeviceError where the engine answers nothing any more."""
        oldest = self._asked[0]
        await oldest.task
        if oldest.answer is None:
            await asyncio.gather(*(asked.task for asked in self._asked))
            failed = [asked for asked in self._asked if asked.answer is None]
            _log.warning("%s. It had %d rows, which are asked again", oldest.failure, len(failed))
            await self._ask_again(failed)
        self._asked.popleft()
        if oldest.mount is not None:
            oldest.mount.close()
        assert oldest.answer is not None
        return oldest.answer

    async def close(self) -> None:
        """Gives up what is not answered."""
        tasks = [asked.task for asked in self._asked]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, asked: _Asked) -> None:
        asked.task = asyncio.create_task(self._answer(asked))

    async def _answer(self, asked: _Asked) -> None:
        record = asked.record
        if record.prompt is None:
            asked.answer = _failed(record, record.error)
            return
        try:
            prompt = record.mounted_prompt(asked.number)
            answer = await Answer.of(self._worker.generate_once(prompt, self._params, str(record.row)))
        except _ENGINE_FAILED as error:
            asked.failure = error
        except MindieMMError as error:
            asked.answer = _failed(record, error)
        else:
            asked.answer = {
                "row": record.row,
                "id": record.id,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
            }

    async def _ask_again(self, rows: Sequence[_Asked]) -> None:
        """While nothing else is asked. Each of them has an answer then."""
        await self._worker.engine.wait_until_up(_BACK_S)
        for asked in rows:
            self._begin(asked)
        await asyncio.gather(*(asked.task for asked in rows))
        failed = [asked for asked in rows if asked.answer is None]
        if len(rows) == 1 and failed:
            await self._require_answering()
            rows[0].answer = _failed(rows[0].record, rows[0].failure)
        elif failed:
            half = len(failed) // 2
            for part in filter(None, (failed[:half], failed[half:])):
                await self._ask_again(part)

    async def _require_answering(self) -> None:
        """ProcessDied, DeviceError unless the engine answers anything at all: then a row's failure is its own."""
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
            return  # such an answer will do


def _failed(record: ShardRow, error: MindieMMError | str | None) -> Line:
    why = f"{error_name(error)}: {error}" if isinstance(error, MindieMMError) else error
    return {"row": record.row, "id": record.id, "error": why}


def _by_shard(dataset: Dataset, rows: range) -> Iterator[tuple[int, range]]:
    """(first row of the shard, those of `rows` that are in it)."""
    for shard in dataset.manifest.shards:
        own = range(max(rows.start, shard.info.first_row), min(rows.stop, shard.info.stop_row))
        if own:
            yield shard.info.first_row, own
