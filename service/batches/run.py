"""Runs one batch, from the check of its input to the files with its output."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from mindie_mm.errors import LimitExceeded, NotStored
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
"""Code and message for the requests of a batch that have no answer, by the outcome of the batch."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system that has no room."""
_FULL_S = 600.0
"""A batch fails if the disk has had no room for it for this time in seconds."""
_FULL_PAUSE_S = 5.0

Answer = Callable[[str, bytes, str], Awaitable[tuple[int, str, bytes]]]
"""Function that answers a request: endpoint, body and owner to status, request id and body."""


@dataclass(frozen=True, slots=True)
class Means:
    """Objects and settings that batches need to run their requests."""

    files: FileStore
    answer: Answer
    is_ready: Callable[[], bool]
    """True if an engine accepts requests, and the service is not stopping."""
    slots: asyncio.Semaphore
    """Limit on the requests of all batches in progress."""
    limits: Limits
    model_names: tuple[str, ...]
    """Names of the served model."""


class BatchRun:
    """One batch that this process runs, while it holds the batch's lock."""

    def __init__(self, folder: BatchFolder, batch: Batch, means: Means) -> None:
        self._folder = folder
        self._batch = batch
        self._means = means
        self._writing = asyncio.Lock()
        self._changed = False
        self._room = 0
        """Number of bytes that can be written before the files of the key are measured again."""

    async def run(self) -> None:
        """Continue the batch until it has ended. Raise OSError if its files cannot be read or written.

        The batch can be continued after an exception, a cancellation or a crash at any point.
        """
        batch = self._batch
        if batch.status in ("validating", "in_progress"):
            requests = await self._requests()
            if requests is not None and batch.status == "validating":
                requests = await self._begun(requests)
            faults.point("batch-begun")
            await self._answer_all(requests)
            batch.output_file_id, batch.error_file_id = (
                f"file-{token_hex(12)}" if path.stat().st_size else None
                for path in (self._folder.output, self._folder.errors)
            )
        if batch.output_file_id or batch.error_file_id:
            await self._become("finalizing")
            faults.point("batch-finalizing")
            await self._ending_with(self._store_output)
        await self._become(batch.outcome)
        faults.point("batch-ended")
        await in_thread(self._folder.end)

    async def _requests(self) -> Requests | None:
        """Return the requests. If the batch ends because of its input, note the reason and return None."""
        batch = self._batch
        limits = self._means.limits if batch.status == "validating" else ACCEPTED
        try:
            requests = await in_thread(lambda: Requests(self._folder.input, batch.endpoint, limits))
        except OSError as error:
            has_expired = batch.expires_at <= time.time()
            if not has_expired and not isinstance(error, FileNotFoundError):
                raise  # the file system may recover
            batch.outcome = "expired" if has_expired else "failed"
            batch.note("unreadable_input", f"the service cannot read the input of the batch: {error.strerror}")
            return None
        if requests.mistakes:
            batch.outcome, batch.mistakes = "failed", requests.mistakes
            return None
        return requests

    async def _begun(self, requests: Requests) -> Requests | None:
        """Note that the batch is in progress. If the disk has no room, note the reason and return None."""
        self._batch.total = len(requests)
        self._set_status("in_progress")
        try:
            await self._when_there_is_room(self._write)
        except OSError as error:
            self._batch.outcome = "failed"
            self._note_no_room(error)
            return None
        return requests

    async def _become(self, status: Status) -> None:
        self._set_status(status)
        await self._ending_with(self._write)

    def _set_status(self, status: Status) -> None:
        self._batch.status = status
        self._batch.times[status] = int(time.time())

    def _write(self) -> None:
        self._folder.write(self._batch)

    async def _when_there_is_room(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread, and repeat it while the disk is full. Raise OSError after `_FULL_S` seconds."""
        deadline, is_noted = time.monotonic() + _FULL_S, False
        while True:
            try:
                await in_thread(write)
            except OSError as error:
                if error.errno not in _FULL or time.monotonic() >= deadline:
                    raise
                if not is_noted:
                    _log.error("the batch %s waits for room on the disk for %g s: %s", self._batch.id, _FULL_S, error)
                is_noted = True
            else:
                return
            await asyncio.sleep(_FULL_PAUSE_S)

    async def _ending_with(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread. If the disk is full, use the room that was kept for the end of the batch."""
        try:
            await in_thread(write)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            await in_thread(lambda: self._folder.spare.unlink(missing_ok=True))
            await in_thread(write)

    def _note_no_room(self, error: LimitExceeded | OSError) -> None:
        """Note why no more lines can be written. Raise `error` if there is another reason than room."""
        if isinstance(error, LimitExceeded):
            self._batch.note("quota_exceeded", str(error))
            return
        if error.errno not in _FULL:
            raise error
        text = f"the disk for the files of the service is full: {error.strerror}"
        self._batch.note("disk_full", f"{text}. Send the requests that have no line again")
        _log.error("the batch %s gets no more lines: %s", self._batch.id, error)

    def _store_output(self) -> None:
        batch = self._batch
        batch.output_file_id = self._stored(batch.output_file_id, self._folder.output)
        batch.error_file_id = self._stored(batch.error_file_id, self._folder.errors)

    def _stored(self, file_id: str | None, path: Path) -> str | None:
        """Move a file of the output into the store, and return its id."""
        if file_id is None:
            return None
        batch = self._batch
        try:
            self._means.files.put(
                self._folder.owner,
                file_id,
                path,
                filename=f"{batch.id}_{path.name}",
                purpose="batch_output",
                expires_after_s=batch.output_expires_after_s,
            )
        except NotStored as error:
            batch.outcome = "failed"
            batch.note("output_lost", str(error))
            return None
        return file_id

    async def _answer_all(self, requests: Requests | None) -> None:
        """Answer the requests that have no answer yet, until the batch expires or is cancelled, or there is no room.

        Without requests, only count the answers of an earlier process.
        """
        batch = self._batch
        with ExitStack() as opened:
            output, errors = AnswerFile(self._folder.output), AnswerFile(self._folder.errors)
            for file in (output, errors):
                opened.callback(file.close)
            answered = await in_thread(lambda: self._count_again([output, errors]))
            if requests is None:
                return
            left = [(index, number) for index, number in enumerate(requests.numbers()) if number not in answered]
            if batch.outcome == "completed":
                batch.outcome = await self._outcome(requests, left, output, errors)
            if batch.outcome != "completed":
                await self._ending_with(self._write)  # a later process must not begin to answer again
            if batch.outcome in _WHY:
                await in_thread(lambda: self._give_up(requests, [output, errors]))

    async def _outcome(
        self, requests: Requests, left: list[tuple[int, int]], output: AnswerFile, errors: AnswerFile
    ) -> Status:
        """Answer requests until the batch is over, and return its outcome. Store its counts meanwhile."""
        if (ending := await self._ending()) is not None:
            return ending
        working = asyncio.create_task(self._work(requests, left, output, errors))
        try:
            while ending is None:
                await asyncio.wait([working], timeout=_LOOK_S)
                if working.done():
                    working.result()
                    return "completed"
                ending = await self._ending()
                if self._changed:
                    self._changed = False
                    await in_thread(self._store_counts)
                self._room = 0  # other files of the key may have grown
        except (LimitExceeded, OSError) as error:
            self._note_no_room(error)
            return "failed"
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        return ending

    def _store_counts(self) -> None:
        """Store the counts, or if the disk is full, have them stored later."""
        try:
            self._write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._changed = True

    async def _ending(self) -> Status | None:
        ending = await in_thread(lambda: self._folder.ending(self._batch))
        if ending == "cancelled":
            self._batch.times["cancelling"] = int(self._folder.cancelled_at or 0)
        return ending

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
        if left:  # compute no answer that cannot be written
            await in_thread(lambda: self._means.files.room(self._folder.owner, 1))
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
        file = output if status == 200 else errors
        async with self._writing:
            await self._when_there_is_room(lambda: self._append(file, line))
            faults.point("batch-answered")
            self._changed = True

    def _append(self, file: AnswerFile, line: bytes) -> None:
        """Append a line and count it. Raise LimitExceeded if the files of the key have no room for it."""
        if len(line) > self._room:
            self._room = self._means.files.room(self._folder.owner, len(line))
        self._batch.count(file.append(line))
        self._room -= len(line)

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
        """Write a line for each request that has no answer, as long as there is room."""
        answered = self._count_again(files)
        code, why = _WHY[self._batch.outcome]
        if not self._folder.spare.exists():  # its room is for the descriptions
            self._note_no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return
        try:
            for index, number in enumerate(requests.numbers()):
                if number not in answered:
                    custom_id = requests.read(index).custom_id
                    self._append(files[-1], error_line(self._batch.id, number, custom_id, code, why))
        except (LimitExceeded, OSError) as error:
            self._note_no_room(error)
