"""The tokenizer's side of the decoder processes: a pool that restarts decoders when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import msgspec
from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import (
    DecoderSetup,
    FromDecoder,
    PlanItem,
    Refused,
    ToDecoder,
    WriteItem,
    Written,
)
from mindie_mm.decode.decoding import Decoding
from mindie_mm.decode.digest import parcel_digest
from mindie_mm.decode.jobs import DecoderProcess, Group, Job, JobQueue
from mindie_mm.decode.nursery_client import NurseryClient
from mindie_mm.decode.parcel import Parcel, pack_copy, pack_file
from mindie_mm.decode.scratch import layout_of
from mindie_mm.errors import NoProcess
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.caps import under
from mindie_mm.nn.family import Plan
from mindie_mm.processes.restarts import Starter, logged
from mindie_mm.processes.tasks import gather, in_thread, off_loop

_log = logging.getLogger(__name__)

_CLOSED = "the decoders are closed"

_MAX_REPLY_BYTES = 2**20
"""Maximum size of a reply in bytes. It prevents a compromised decoder from filling the tokenizer's memory."""

_HANG_S = 60.0
"""Time in seconds after which a decoder that has a job, but uses no CPU time, is considered to hang.

Such a decoder is killed within twice this time. `limit_processor_time` kills a decoder that uses too much CPU time.
"""


class Decoders(Decoding[Parcel]):
    """Pool of decoder processes. If a decoder dies, the pool starts a new one.

    If a decoder dies while it works on an item, another decoder tries the item once more. Canceling `plan` or `write`
    kills the item's decoder immediately.
    """

    def __init__(self, setup: DecoderSetup, max_item_bytes: int) -> None:
        """Prepare the pool. Call `open` to start the processes.

        Args:
            setup: Settings of the decoders.
            max_item_bytes: Maximum total size of the arrays of one item in bytes.

        """
        self._queue = JobQueue()
        self._nursery = NurseryClient(setup, max_item_bytes, self._queue.fail)
        self._caps = setup.media
        self._processes: list[DecoderProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromDecoder](FromDecoder)

    @classmethod
    async def start(cls, setup: DecoderSetup, max_item_bytes: int, number: int) -> Self:
        """Create a pool and start `number` decoders. Raise the same errors as `open`."""
        decoders = cls(setup, max_item_bytes)
        await decoders.open(number)
        return decoders

    async def open(self, number: int) -> None:
        """Start `number` decoders. If one of them cannot be started, stop all of them.

        Raises:
            UnsupportedCheckpoint: No family supports the checkpoint.
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

    async def read(self, group: Group, media: Media, counts: Mapping[Kind, int]) -> Parcel:
        if (parcel := pack_file(media, counts)) is not None:
            group.files.callback(os.close, parcel.descriptor)
            return parcel

        given_up = threading.Event()

        def pack() -> Parcel:
            with cancellation.until(given_up), under(self._caps):
                copied = pack_copy(media, counts)
            group.files.callback(os.close, copied.descriptor)
            return copied

        return await in_thread(pack, given_up.set)  # fetching and reading may take a long time

    async def plan(self, group: Group, source: Parcel) -> Plan:
        reply, _ = await self._do(Job(group, source, asyncio.get_running_loop().create_future()))
        return cast("Plan", reply)

    async def digest(self, settings: str, source: Parcel, salt: str) -> bytes:
        return await off_loop(source.nbytes, lambda: parcel_digest(settings, source, salt))

    async def write(self, group: Group, source: Parcel, arrays: Mapping[str, NDArray[Any]]) -> None:
        reply = asyncio.get_running_loop().create_future()
        _, process = await self._do(Job(group, source, reply, layout_of(arrays)))
        try:
            num_bytes = sum(array.nbytes for array in arrays.values())
            await off_loop(num_bytes, lambda: process.scratch.copy_to(arrays))
        finally:
            process.job = None
            self._hand_out()

    def let_go(self, group: Group) -> None:
        for process in self._processes:
            if process.kept_for is group:
                process.kept_for = None
                self._hand_out()

    async def close(self) -> None:
        """Stop all processes. All waiting and running jobs fail with NoProcess."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            await process.channel.close()
        await self._nursery.close()
        self._queue.fail(_CLOSED)
        for process in self._processes:
            if process.job is not None:
                process.job.fail(NoProcess(_CLOSED))
        self._processes.clear()

    async def _do(self, job: Job) -> tuple[FromDecoder, DecoderProcess]:
        if why := _CLOSED if self._closed else self._nursery.hopeless:
            raise NoProcess(why)
        self._queue.add(job)
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

    def _give_up(self, job: Job) -> None:
        """Remove a job from the queue, or kill the decoder that works on it."""
        self._queue.drop(job)
        for process in self._processes:
            if process.job is job:
                process.killed = True
                self._nursery.kill(process.pid)

    def _hand_out(self) -> None:
        for process in sorted(self._processes, key=lambda process: process.kept_for is None):  # reserved decoders first
            if process.job is None and not process.killed and (job := self._queue.next(process.kept_for)) is not None:
                self._send(process, job)

    def _send(self, process: DecoderProcess, job: Job) -> None:
        message: ToDecoder
        descriptors = [job.parcel.descriptor]
        if job.layout is None:
            message = PlanItem(job.parcel)
        elif process.planned is job.parcel:
            message, descriptors = WriteItem(job.layout, None), []
        else:
            message = WriteItem(job.layout, job.parcel)
        process.job, process.planned, process.kept_for = job, None, None
        process.channel.send_with(self._encoder.encode(message), descriptors)

    async def _receive(self, process: DecoderProcess, starter: Starter) -> None:
        """Pass replies to their callers until the process dies.

        Raises:
            ValueError: The process has sent an invalid message. A malicious item may have compromised the process.

        """
        while True:
            try:
                reply = self._decoder.decode(await process.channel.recv(_MAX_REPLY_BYTES))
            except EOFError:
                return
            job = process.job
            if job is None or isinstance(reply, Written if job.layout is None else Plan):
                raise ValueError(f"the decoder sent an unexpected {type(reply).__name__}")
            starter.proved()
            if not isinstance(reply, Written) or job.reply.done():  # otherwise, `write` still has to copy the arrays
                process.job = None
            if isinstance(reply, Plan):
                process.planned = job.parcel
                process.kept_for = job.group if job.group.keeps_decoder else None
            if not job.reply.done():
                job.reply.set_result((reply, process))
            self._hand_out()

    async def _keep(self, process: DecoderProcess) -> None:
        """Receive the replies of `process`, and of the processes that replace it, until canceled."""
        starter = Starter("a decoder")
        while True:
            with logged(f"the connection to decoder {process.pid} failed"):
                await self._receive(process, starter)
            await self._reap(process)
            if process.killed or process.job is not None:
                starter.proved()  # the item caused the exit, so the next decoder starts without a pause
            process = await starter.again(self._fork)

    async def _end_hanging(self) -> None:
        """Kill decoders that hang, so that other decoders process the items of these decoders. Run until canceled."""
        before: dict[DecoderProcess, tuple[Job | None, int]] = {}
        while True:
            await asyncio.sleep(_HANG_S)
            working = [process for process in self._processes if process.job and not process.job.reply.done()]
            after = {process: (process.job, _processor_ticks(process.pid)) for process in working}
            for process, work in after.items():
                if work == before.get(process):
                    _log.error("decoder %d has made no progress for %g s and was killed", process.pid, _HANG_S)
                    self._nursery.kill(process.pid)
            before = after

    async def _reap(self, process: DecoderProcess) -> None:
        """Kill a process, wait for its exit status, and retry or fail its job."""
        self._processes.remove(process)
        # The process may still be running if it closed the channel or sent an invalid message.
        self._nursery.kill(process.pid)
        status = await process.status
        await process.channel.close()
        process.scratch.close()
        if process.killed:
            return
        _log.warning("decoder %d died with status %s", process.pid, status)
        job = process.job
        if job is None or job.reply.done():
            return
        if error := job.final_error(status, self._caps):
            job.fail(error)
            return
        job.is_second_try = True
        self._queue.put_back(job)
        self._hand_out()

    async def _fork(self) -> DecoderProcess:
        """Fork a decoder and send it a waiting job, if any. Raise ProcessDied if the nursery dies."""
        born = await self._nursery.fork()
        process = DecoderProcess(born.pid, born.channel, born.status, born.scratch)
        self._processes.append(process)
        self._hand_out()
        return process


def _processor_ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks, or -1 if the process has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])
