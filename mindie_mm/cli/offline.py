"""A finished run of `tokenize` through the engine, shard after shard, answers in the order of rows."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mindie_mm.batch import Dataset
from mindie_mm.batch.files import replacing
from mindie_mm.batch.mounting import renumbered, reserved
from mindie_mm.batch.settings import model_digest
from mindie_mm.batch.shard import ShardRow, arena_path
from mindie_mm.config import WorkerConfig
from mindie_mm.engine.retry import PromptSource
from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.engine.worker import Worker
from mindie_mm.errors import InputError, MindieMMError, StorageError, error_name
from mindie_mm.nn.checkpoint import Checkpoint

Answer = dict[str, Any]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the answers in a file; it stands beside them."""

    run: str
    """`Run.digest` of the rows."""
    model: str
    """The directory of the checkpoint that answers: its weights are known by nothing else."""
    model_digest: str
    sampling: SamplingParams

    @staticmethod
    def path(output: Path) -> Path:
        """Where it stands."""
        return output.with_name(output.name + ".origin.json")

    def begin(self, output: Path) -> None:
        """Writes it. StorageError."""
        with replacing(self.path(output)) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(self) + b"\n")

    def require(self, output: Path) -> None:
        """InputError, with what differs, unless the answers in `output` are of this origin."""
        file = self.path(output)
        try:
            earlier = msgspec.json.decode(file.read_bytes(), type=Origin)
        except FileNotFoundError:
            raise InputError(f"{output} is not what an earlier call left: there is no {file}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{file} is not what an earlier call left: {error}") from None
        before, now = msgspec.structs.asdict(earlier), msgspec.structs.asdict(self)
        before |= msgspec.structs.asdict(before.pop("sampling"))
        now |= msgspec.structs.asdict(now.pop("sampling"))
        differing = [f"{name} was {before[name]}, now {value}" for name, value in now.items() if before[name] != value]
        if differing:
            raise InputError(f"{output} has other answers: {'; '.join(differing)}. Name another file")


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

    InputError if `output` is not this run's, or, without `other_model`, its rows are not of `config`'s checkpoint;
    StorageError if it cannot be written, CorruptReference if a shard is not what the run wrote; errors as Worker.start.
    """
    stop, run = min(len(dataset), limit or len(dataset)), dataset.manifest.run
    checkpoint = Checkpoint.open(config.model)
    if not other_model:
        run.require_model(checkpoint)
    origin = Origin(
        run=run.digest,
        model="" if config.model is None else os.fsencode(config.model.absolute()).decode(errors="backslashreplace"),
        model_digest=model_digest(checkpoint),
        sampling=params,
    )
    with _continued(output, origin) as (file, begun, earlier_errors, last_id):
        if begun > stop:
            raise InputError(f"{output} has {begun} rows; {stop} are asked for")
        if begun and last_id != (own := dataset.record(begun - 1).id):
            raise InputError(f"{output} answers another run: its row {begun - 1} is {last_id!r}, this run's {own!r}")
        errors, rows = earlier_errors, range(begun, stop)
        async with _started(config) as worker, aclosing(_answers(dataset, rows, worker, params)) as answers:
            async for answer in answers:
                errors += "error" in answer
                file.write(msgspec.json.encode(answer) + b"\n")
                file.flush()
    return stop, errors


async def _answers(
    dataset: Dataset, rows: range, worker: Worker, params: SamplingParams
) -> AsyncGenerator[Answer, None]:
    """As many rows at a time as the engine runs, and as many again that wait; a shard is mounted while it is read."""
    running: deque[asyncio.Task[Answer]] = deque()
    most = 2 * worker.config.engine.max_num_seqs
    try:
        for first_row, own in _by_shard(dataset, rows):
            async with AsyncExitStack() as stack:
                await asyncio.to_thread(dataset.shard(first_row).verify, dataset.folder)
                number = stack.enter_context(reserved())
                worker.engine.mount(arena_path(dataset.folder, first_row), number)
                stack.callback(worker.engine.unmount, number)
                for row in own:
                    running.append(asyncio.create_task(_answer(dataset.record(row), number, worker, params)))
                    if len(running) == most:
                        yield await running.popleft()
                while running:
                    yield await running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(record: ShardRow, number: int, worker: Worker, params: SamplingParams) -> Answer:
    named = {"row": record.row, "id": record.id}
    if record.prompt is None:
        return named | {"error": record.error}
    text, token_ids, reason = "", list[int](), None
    try:
        source = PromptSource(renumbered(record, number))
        async with aclosing(worker.generate(source, params, str(record.row))) as deltas:
            async for delta in deltas:
                text, reason = text + delta.text, delta.finish_reason
                token_ids += delta.token_ids
    except MindieMMError as error:
        return named | {"error": f"{error_name(error)}: {error}"}
    return named | {"text": text, "token_ids": token_ids, "finish_reason": reason}


def _by_shard(dataset: Dataset, rows: range) -> Iterator[tuple[int, range]]:
    """(first row of the shard, those of `rows` that are in it)."""
    for shard in dataset.manifest.shards:
        own = range(max(rows.start, shard.info.first_row), min(rows.stop, shard.info.stop_row))
        if own:
            yield shard.info.first_row, own


@contextmanager
def _continued(output: Path, origin: Origin) -> Iterator[tuple[BinaryIO, int, int, str | None]]:
    """The file of answers, to write behind those that it has, and what `_begun` says of them."""
    try:
        with output.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another call writes {output}") from None
            if file.tell():
                origin.require(output)
            else:
                origin.begin(output)
            yield file, *_begun(file, output)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror}") from error


def _begun(file: BinaryIO, output: Path) -> tuple[int, int, str | None]:
    """How many answers are there, errors among them, the last one's id; a line that was cut short is removed."""
    rows = errors = whole = 0
    last_id = None
    file.seek(0)
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            answer = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("row") != rows:
            raise InputError(f"{output} is not what an earlier call left: line {rows + 1} is not row {rows}")
        rows, errors, whole = rows + 1, errors + ("error" in answer), whole + len(line)
        last_id = answer.get("id")
    file.truncate(whole)
    return rows, errors, last_id


@asynccontextmanager
async def _started(config: WorkerConfig) -> AsyncIterator[Worker]:
    worker = await Worker.start(config, in_process=True)
    try:
        yield worker
    finally:
        await worker.close()
