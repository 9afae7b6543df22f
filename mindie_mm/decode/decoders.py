"""The tokenizer's side of the decoders: who decodes what next, and what becomes of an item whose decoder dies."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import msgspec
from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import (
    DecoderSetup,
    Facts,
    FromDecoder,
    Item,
    PlanItem,
    Refused,
    ToDecoder,
    WriteItem,
    Written,
)
from mindie_mm.decode.nursery_client import NurseryClient
from mindie_mm.decode.scratch import Layout, Scratch, layout_of
from mindie_mm.errors import LimitExceeded, MediaError, MindieMMError, NoProcess, ProcessDied
from mindie_mm.processes.ipc import Channel
from mindie_mm.processes.restarts import Starter, logged
from mindie_mm.processes.tasks import gather, off_loop

_log = logging.getLogger(__name__)

_CLOSED = "the decoders are closed"

_MAX_REPLY_BYTES = 2**20
"""Maximum size of a reply in bytes. A decoder that was taken over must not fill the tokenizer's memory."""

_HANG_S = 60.0
"""Time in seconds without any processor time after which a decoder that has an item hangs.

The decoder is killed within twice this time. `limit_processor_time` ends a decoder that spins.
"""

_FAULTS_OF_THE_ITEM = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that a decoder brings on itself. Anything else comes from outside, such as the kernel out of memory."""


@dataclass(slots=True, eq=False)
class Group:
    """The items of one request. Groups take turns, so that a request of many items delays no other."""

    keeps_decoder: bool = False
    """Whether the decoder that has planned an item waits for the same item's block, until `Decoders.let_go`."""


@dataclass(slots=True, eq=False)
class _Job:
    """An item to plan or to write."""

    group: Group
    item: Item
    descriptor: int
    reply: asyncio.Future[tuple[FromDecoder, _Process]]
    layout: Layout | None = None
    """Where its arrays are to lie. None: plan the item."""
    is_second_try: bool = False


@dataclass(slots=True, eq=False)
class _Process:
    """A decoder process."""

    pid: int
    channel: Channel
    status: asyncio.Future[int | None]
    """Exit status, once the nursery has told it. None if it is unknown."""
    scratch: Scratch
    job: _Job | None = None
    """What it does now."""
    planned: Item | None = None
    """The item whose plan it holds."""
    kept_for: Group | None = None
    """The group whose next item it gets."""
    killed: bool = False
    """Whether it was killed because nobody waits for its item any more."""


class Decoders:
    """A number of decoder processes, each started again when it dies.

    A dying decoder costs one item, which is tried once more. Cancelling `plan` or `write` kills the decoder at once.
    """

    def __init__(self, setup: DecoderSetup, max_item_bytes: int) -> None:
        """Prepare the decoders. Use `start` or `open` before their first item.

        Args:
            setup: Settings of the decoders.
            max_item_bytes: Maximum number of bytes that the arrays of an item take.

        """
        self._nursery = NurseryClient(setup, max_item_bytes, self._fail_waiting)
        self._max_decode_s = setup.media.max_decode_s
        self._processes: list[_Process] = []
        self._waiting: OrderedDict[Group, deque[_Job]] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromDecoder](FromDecoder)

    @classmethod
    async def start(cls, setup: DecoderSetup, max_item_bytes: int, number: int) -> Self:
        """Return `number` open decoders. Errors are those of `open`."""
        decoders = cls(setup, max_item_bytes)
        await decoders.open(number)
        return decoders

    async def open(self, number: int) -> None:
        """Start `number` decoders. If one fails, end all of them.

        Raises:
            UnsupportedCheckpoint: No family serves the checkpoint.
            ProcessDied: The nursery cannot be started.

        """
        try:
            await self._nursery.open()
            processes = await gather([self._fork() for _ in range(number)])
        except BaseException:
            await self.close()
            raise
        self._tasks += [asyncio.create_task(self._keep(process)) for process in processes]
        self._tasks.append(asyncio.create_task(self._end_hanging()))

    @property
    def pids(self) -> list[int]:
        """Process ids of the live decoders."""
        return [process.pid for process in self._processes]

    async def plan(self, group: Group, item: Item, descriptor: int) -> Facts:
        """Return the plan of an item whose file is open as `descriptor`.

        Raises:
            InputError: The item is wrong. MediaError also if it has ended two decoders.
            OperationalError: The decoder has failed. ProcessDied if two were killed.

        """
        reply, _ = await self._do(_Job(group, item, descriptor, asyncio.get_running_loop().create_future()))
        return cast("Facts", reply)

    async def write(self, group: Group, item: Item, descriptor: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Decode an item into `arrays`. Raises as `plan`."""
        reply = asyncio.get_running_loop().create_future()
        _, process = await self._do(_Job(group, item, descriptor, reply, layout_of(arrays)))
        try:
            num_bytes = sum(array.nbytes for array in arrays.values())
            await off_loop(num_bytes, lambda: process.scratch.copy_to(arrays))
        finally:
            process.job = None
            self._hand_out()

    def let_go(self, group: Group) -> None:
        """Let other requests have the decoder that was kept for `group`, if there is one."""
        for process in self._processes:
            if process.kept_for is group:
                process.kept_for = None
                self._hand_out()

    async def close(self) -> None:
        """End all processes. Items in progress fail with NoProcess."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            await process.channel.close()
        await self._nursery.close()
        self._fail_waiting(_CLOSED)
        for process in self._processes:
            if process.job is not None:
                _fail(process.job.reply, NoProcess(_CLOSED))
        self._processes.clear()

    async def _do(self, job: _Job) -> tuple[FromDecoder, _Process]:
        if why := _CLOSED if self._closed else self._nursery.why_down:
            raise NoProcess(why)
        self._waiting.setdefault(job.group, deque()).append(job)
        self._hand_out()
        try:
            reply, process = await job.reply
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        if isinstance(reply, Refused):
            if reply.frames:
                _log.error("%s\n%s", reply.error.message, reply.frames)
            raise reply.error.exception()
        return reply, process

    def _give_up(self, job: _Job) -> None:
        """Drop a job, or kill the decoder that does it."""
        jobs = self._waiting.get(job.group, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.group]
        for process in self._processes:
            if process.job is job:
                process.killed = True
                self._nursery.kill(process.pid)

    def _hand_out(self) -> None:
        for process in sorted(self._processes, key=lambda process: process.kept_for is None):  # the kept ones first
            if process.job is None and not process.killed and (job := self._next_job(process)) is not None:
                self._send(process, job)

    def _next_job(self, process: _Process) -> _Job | None:
        """Take the next item for `process` out of the queue. Groups take turns."""
        for group in self._waiting:
            if process.kept_for in (None, group):
                jobs = self._waiting.pop(group)
                job = jobs.popleft()
                if jobs:
                    self._waiting[group] = jobs  # at the end
                return job
        return None

    def _send(self, process: _Process, job: _Job) -> None:
        message: ToDecoder
        descriptors = [job.descriptor]
        if job.layout is None:
            message = PlanItem(job.item)
        elif process.planned is job.item:
            message, descriptors = WriteItem(job.layout, None), []
        else:
            message = WriteItem(job.layout, job.item)
        process.job, process.planned, process.kept_for = job, None, None
        process.channel.send_with(self._encoder.encode(message), descriptors)

    async def _receive(self, process: _Process, starter: Starter) -> None:
        """Pass replies to their callers until the process dies.

        Raises:
            ValueError: The process sends what no decoder sends. It may have been taken over by an item.

        """
        while True:
            try:
                reply = self._decoder.decode(await process.channel.recv(_MAX_REPLY_BYTES))
            except EOFError:
                return
            job = process.job
            if job is None or isinstance(reply, Written if job.layout is None else Facts):
                raise ValueError(f"a {type(reply).__name__} answers nothing that the decoder was asked")
            starter.proved()
            if not isinstance(reply, Written) or job.reply.done():  # else `write` copies the arrays first
                process.job = None
            if isinstance(reply, Facts):
                process.planned = job.item
                process.kept_for = job.group if job.group.keeps_decoder else None
            if not job.reply.done():
                job.reply.set_result((reply, process))
            self._hand_out()

    async def _keep(self, process: _Process) -> None:
        """Serve `process` and its successors until cancelled."""
        starter = Starter("a decoder")
        while True:
            with logged(f"decoder {process.pid} cannot be served"):
                await self._receive(process, starter)
            await self._reap(process)
            if process.killed or process.job is not None:
                starter.proved()  # the item was the cause, so the next decoder starts without a pause
            process = await starter.again(self._fork)

    async def _end_hanging(self) -> None:
        """Kill decoders that hang, until cancelled. Their items are tried again."""
        before: dict[_Process, tuple[_Job | None, int]] = {}
        while True:
            await asyncio.sleep(_HANG_S)
            working = [process for process in self._processes if process.job and not process.job.reply.done()]
            after = {process: (process.job, _processor_ticks(process.pid)) for process in working}
            for process, work in after.items():
                if work == before.get(process):
                    _log.error("decoder %d has done nothing for %g s, and is killed", process.pid, _HANG_S)
                    self._nursery.kill(process.pid)
            before = after

    async def _reap(self, process: _Process) -> None:
        """End a process that is not served any more, learn how it ended, and try its item again or fail it."""
        self._processes.remove(process)
        self._nursery.kill(process.pid)  # it lives on if it has closed the channel itself, or has sent a wrong message
        status = await process.status
        await process.channel.close()
        process.scratch.close()
        if process.killed:
            return
        _log.warning("decoder %d died with status %s", process.pid, status)
        job = process.job
        if job is None or job.reply.done():
            return
        if error := self._final_error(job, status):
            job.reply.set_exception(error)
            return
        job.is_second_try = True
        self._waiting.setdefault(job.group, deque()).appendleft(job)
        self._waiting.move_to_end(job.group, last=False)
        self._hand_out()

    def _final_error(self, job: _Job, status: int | None) -> MindieMMError | None:
        """Return the error of an item whose decoder died with `status`, or None if the item is tried again."""
        if status == -signal.SIGXCPU:
            return LimitExceeded(
                f"decoding takes more than {self._max_decode_s:g} s of processor time, the limit (--max-decode-s)"
            )
        if not job.is_second_try:
            return None
        if status is not None and -status in _FAULTS_OF_THE_ITEM:
            return MediaError(f"it has ended two decoders, the last with {signal.Signals(-status).name}")
        return ProcessDied(f"two decoders died while they decoded it, the last with status {status}")

    async def _fork(self) -> _Process:
        """Have a decoder forked, and give it work. Raise ProcessDied if that fails."""
        born = await self._nursery.fork()
        process = _Process(born.pid, born.channel, born.status, born.scratch)
        self._processes.append(process)
        self._hand_out()
        return process

    def _fail_waiting(self, why: str) -> None:
        """Fail the items that no decoder has."""
        while self._waiting:
            for job in self._waiting.popitem()[1]:
                _fail(job.reply, NoProcess(why))


def _processor_ticks(pid: int) -> int:
    """Return the processor time of a process in clock ticks, or -1 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def _fail(future: asyncio.Future[Any], error: MindieMMError) -> None:
    if not future.done():
        future.set_exception(error)
