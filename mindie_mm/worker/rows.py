"""Answers single rows of a finished `tokenize` run with the engines of this machine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.engine.requests.engine_messages import Ready
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError, MindieMMError, NoProcess, ProcessDied, error_name
from mindie_mm.processes.tasks import in_thread
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import Arena, Block
from mindie_mm.tokenize.prompt import Prompt, put_words
from mindie_mm.worker.answer_file import Line, Requests
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker

ENGINE_FAILED = (ProcessDied, NoProcess, DeviceError)
"""Errors of an engine that the row may have caused, but need not have."""
_TOKENIZER_ARENA_BYTES = 1 << 20
"""Size of the arena of the worker's tokenizer, which tokenizes nothing."""


class RowWorker:
    """Answers rows of a dataset with the engines of this machine."""

    def __init__(
        self, dataset: Dataset, arena: Arena, worker: Worker, requests: Requests, *, verifies: bool = False
    ) -> None:
        """Take the parts of the worker. Call `row_worker` instead.

        Args:
            dataset: Dataset whose rows are answered.
            arena: Shared memory for the arrays of rows.
            worker: Worker with the engines.
            requests: Sampling settings of the rows, and the form of their answers.
            verifies: Whether to compare the digests of a row's arrays, because the caller has not verified its shard.

        """
        self._dataset = dataset
        self._verifies = verifies
        self._arena = arena
        self._worker = worker
        self._requests = requests

    @property
    def info(self) -> Ready:
        """Information about the engines."""
        return self._worker.engine.info

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._worker.engine.engines)

    async def answer(self, record: ShardRow) -> Line:
        """Return the answer to a row, or the row's error.

        Raises:
            ProcessDied, NoProcess, DeviceError: The engine failed.
            CorruptReference, StorageError: The row's arrays cannot be read.

        """
        copy = partial(self._copied, record)
        prompt = await copy()  # if the arrays cannot be read, the run ends
        try:
            # another attempt after the death of an engine would hide a row that kills the engine
            source = PromptSource(prompt, copy, deaths=0)
            return await self._requests.line(self._worker, record, source)
        except ENGINE_FAILED:
            raise
        except MindieMMError as error:
            return self._requests.error_line(record, reason(error))

    async def wait_until_up(self, wait_s: float) -> None:
        """Wait until an engine accepts requests. Raise the errors of `AsyncEngine.wait_until_up`."""
        await self._worker.engine.wait_until_up(wait_s)

    async def require_answering(self) -> None:
        """Raise an error of `ENGINE_FAILED` if even a trivial request makes the engine fail."""
        one = SamplingParams(max_tokens=1)
        try:
            async with aclosing(self._worker.engine.generate("anything", np.zeros(1, np.int64), one)) as steps:
                async for _ in steps:
                    pass
        except ENGINE_FAILED:
            raise
        except MindieMMError:
            return  # an error of the request shows that the engine works

    async def _copied(self, record: ShardRow) -> Prompt:
        """Copy the row's arrays to the arena, and return its prompt with handle words. Wait while the arena is full."""
        specs = self._dataset.specs(record)
        if not specs:
            return record.prompt
        # Arrays are read after the allocation, so that the arena limits how many rows of a store are in memory.
        blocks = await self._arena.allocate_together(specs, path_file=None, timeout_s=math.inf)
        try:
            await in_thread(partial(self._fill, blocks, record))
            words = [
                block.publish(digest).to_words() for block, digest in zip(blocks, record.digests or (), strict=True)
            ]
        except BaseException:
            for block in blocks:
                self._arena.free(block)
            raise
        return put_words(record.prompt, words)

    def _fill(self, blocks: Sequence[Block], record: ShardRow) -> None:
        for block, arrays in zip(blocks, self._dataset.arrays(record, verified=self._verifies), strict=True):
            for name, array in arrays.items():
                block[name][...] = array


@asynccontextmanager
async def row_worker(
    dataset: Dataset,
    config: WorkerConfig,
    requests: Requests,
    loading: Callable[[float], object] | None = None,
    *,
    verifies: bool = False,
) -> AsyncIterator[RowWorker]:
    """Start the engines that `config` states, and yield the worker. Raise the errors of `Worker.start`.

    `loading` has the same meaning as in `Worker.start`, and the other arguments as in `RowWorker`.
    """
    largest = max(shard.info.max_row_bytes for shard in dataset.manifest.shards)
    own = replace(config, arena_bytes=_TOKENIZER_ARENA_BYTES)
    async with await Worker.start(own, in_process=True, loading=loading) as worker:
        # Twice the size of the largest row leaves room for the headers and the size classes of its blocks.
        with Arena.create(max(config.arena_bytes, 2 * largest)) as arena:
            yield RowWorker(dataset, arena, worker, requests, verifies=verifies)


def reason(error: MindieMMError) -> str:
    """Return the text that a row's line states as its error."""
    return f"{error_name(error)}: {error}"
