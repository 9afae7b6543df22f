"""Runs one batch, from the check of its input to the files with its output."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from secrets import token_hex

from mindie_mm.processes import faults
from mindie_mm.processes.tasks import in_thread, task_group
from service.batches.answers import AnswerFile, answer_line, error_line
from service.batches.record import Batch, Status
from service.batches.requests import ACCEPTED, Limits, Requests
from service.batches.store import BatchFolder
from service.files.store import FileStore

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Time in seconds between two looks for a cancellation."""
_RETRIES_S = (1.0, 5.0, 25.0)
"""Pauses in seconds before a request is repeated that failed because of the service."""
_REPEATED = frozenset({429, 503})
"""Statuses of answers that say nothing about the request."""
_WHY = {
    "expired": ("batch_expired", "this request was not answered before the completion window ended"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}

Answer = Callable[[str, bytes, str], Awaitable[tuple[int, str, bytes]]]
"""Function that answers a request: endpoint, body and owner to status, request id and body."""


@dataclass(frozen=True, slots=True)
class Means:
    """What batches need to run."""

    files: FileStore
    answer: Answer
    is_ready: Callable[[], bool]
    """Whether an engine accepts requests, and the service is not stopping."""
    slots: asyncio.Semaphore
    """Limit on the requests of all batches in progress."""
    limits: Limits


class BatchRun:
    """One batch that this process runs, while it holds the batch's lock."""

    def __init__(self, folder: BatchFolder, batch: Batch, means: Means) -> None:
        self._folder = folder
        self._batch = batch
        self._means = means
        self._writing = asyncio.Lock()
        self._changed = False

    async def run(self) -> None:
        """Continue the batch until it has ended. Raise OSError if its files cannot be read or written.

        The batch can be continued after an exception, a cancellation or a crash at any point.
        """
        batch = self._batch
        if batch.status in ("validating", "in_progress"):
            limits = self._means.limits if batch.status == "validating" else ACCEPTED
            requests = await in_thread(lambda: Requests(self._folder.input, batch.endpoint, limits))
            if requests.mistakes:
                batch.mistakes = requests.mistakes
                await self._become("failed")
                await in_thread(self._folder.end)
                return
            if batch.status == "validating":
                batch.total = len(requests)
                await self._become("in_progress")
            faults.point("batch-begun")
            await self._answer_all(requests)
            batch.output_file_id, batch.error_file_id = (
                f"file-{token_hex(12)}" if path.stat().st_size else None
                for path in (self._folder.output, self._folder.errors)
            )
            await self._become("finalizing")
            faults.point("batch-finalizing")
        await in_thread(self._store_output)
        await self._become(batch.outcome)
        faults.point("batch-ended")
        await in_thread(self._folder.end)

    async def _become(self, status: Status) -> None:
        self._batch.status = status
        self._batch.times[status] = int(time.time())
        await in_thread(lambda: self._folder.write(self._batch))

    def _store_output(self) -> None:
        batch = self._batch
        for file_id, path in ((batch.output_file_id, self._folder.output), (batch.error_file_id, self._folder.errors)):
            if file_id is not None:
                self._means.files.put(
                    self._folder.owner,
                    file_id,
                    path,
                    filename=f"{batch.id}_{path.name}",
                    purpose="batch_output",
                    expires_after_s=batch.output_expires_after_s,
                )

    async def _answer_all(self, requests: Requests) -> None:
        """Answer the requests that have no answer yet, until the batch expires or is cancelled."""
        batch = self._batch
        with ExitStack() as opened:
            output, errors = AnswerFile(self._folder.output), AnswerFile(self._folder.errors)
            for file in (output, errors):
                opened.callback(file.close)
            answered = await in_thread(lambda: self._count_again([output, errors]))
            left = [(index, number) for index, number in enumerate(requests.numbers()) if number not in answered]
            if batch.outcome == "completed":
                working = asyncio.create_task(self._work(requests, left, output, errors))
                try:
                    while (outcome := await self._outcome(working)) is None:
                        await asyncio.wait([working], timeout=_LOOK_S)
                finally:
                    working.cancel()
                    await asyncio.gather(working, return_exceptions=True)
                batch.outcome = outcome
            if batch.outcome != "completed":
                await in_thread(lambda: self._folder.write(batch))  # a later process must not begin to answer again
                await in_thread(lambda: self._give_up(requests, [output, errors]))

    async def _outcome(self, working: asyncio.Task[None]) -> Status | None:
        """Return the outcome if the batch is over, and store its counts otherwise."""
        if working.done():
            working.result()
            return "completed"
        if self._batch.expires_at <= time.time():
            return "expired"
        if await in_thread(lambda: self._folder.is_cancelled):
            self._batch.times["cancelling"] = int(time.time())
            return "cancelled"
        if self._changed:
            self._changed = False
            await in_thread(lambda: self._folder.write(self._batch))
        return None

    def _count_again(self, files: list[AnswerFile]) -> set[int]:
        """Count the lines of an earlier process, and return the numbers of their requests."""
        batch = self._batch
        batch.completed = batch.failed = 0
        batch.input_tokens = batch.cached_tokens = batch.output_tokens = batch.reasoning_tokens = 0
        answered = set()
        for file in files:
            for line in file.lines():
                batch.count(line)
                answered.add(line.number)
        return answered

    async def _work(
        self, requests: Requests, left: list[tuple[int, int]], output: AnswerFile, errors: AnswerFile
    ) -> None:
        slots = self._means.slots
        async with task_group() as group:
            for index, number in left:
                await slots.acquire()
                task = group.create_task(self._answer(requests, index, number, output, errors))
                task.add_done_callback(lambda _: slots.release())

    async def _answer(
        self, requests: Requests, index: int, number: int, output: AnswerFile, errors: AnswerFile
    ) -> None:
        """Answer a request and write its line."""
        request = await in_thread(lambda: requests.read(index))
        status, request_id, body = await self._answered(request.url, bytes(request.body))
        line = answer_line(self._batch.id, number, request.custom_id, status, request_id, body)
        most, file = self._means.limits.output_bytes, output if status == 200 else errors
        async with self._writing:
            if output.num_bytes + errors.num_bytes + len(line) > most:
                why = f"the answers of the batch have more than {most} bytes, which is the limit of all files of a key"
                line, file = error_line(self._batch.id, number, request.custom_id, "output_too_large", why), errors
            written = await in_thread(lambda: file.append(line))
            faults.point("batch-answered")
            self._batch.count(written)
            self._changed = True

    async def _answered(self, endpoint: str, body: bytes) -> tuple[int, str, bytes]:
        """Return the answer to a request. Repeat the request if it fails because of the service."""
        for pause_s in (*_RETRIES_S, None):
            while not self._means.is_ready():  # noqa: ASYNC110 - engines announce no event
                await asyncio.sleep(_LOOK_S)
            answer = await self._means.answer(endpoint, body, self._folder.owner)
            if answer[0] not in _REPEATED or pause_s is None:
                return answer
            await asyncio.sleep(pause_s)
        raise AssertionError("the last answer is returned")

    def _give_up(self, requests: Requests, files: list[AnswerFile]) -> None:
        """Write a line for each request that has no answer."""
        answered = self._count_again(files)
        code, why = _WHY[self._batch.outcome]
        for index, number in enumerate(requests.numbers()):
            if number not in answered:
                line = error_line(self._batch.id, number, requests.read(index).custom_id, code, why)
                self._batch.count(files[-1].append(line))
