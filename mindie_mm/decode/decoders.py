"""The tokenizer's side of the decoder processes: a pool that replaces decoders."""

from __future__ import annotations

import asyncio
import logging
import os
import textwrap
import threading
from collections.abc import Coroutine, Hashable, Mapping
from contextlib import suppress
from typing import Any, cast

import msgspec
from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import (
    DecoderSetup,
    FromDecoder,
    PlanItem,
    Planned,
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
from mindie_mm.errors import LimitExceeded, MindieMMError, NoProcess, OperationalError, ProcessDied
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.caps import under
from mindie_mm.processes.restarts import logged
from mindie_mm.processes.tasks import gather, in_thread, off_loop

_log = logging.getLogger(__name__)

_CLOSED = "the decoders are closed"

_MAX_REPLY_BYTES = 2**20
"""Maximum size of a reply in bytes. It prevents a compromised decoder from filling the tokenizer's memory."""

_WATCH_S = 1.0
"""Time in seconds between two looks at the processor time, wall time and memory of all decoders."""

_KEPT_DECODERS = 8
"""Number of decoders that are kept for their domains, unless more work at the same time. An idle one takes 30 MB."""

_PAUSE_S = 0.5
"""Time in seconds before a decoder is forked if the last one could not be forked, or died before it had a job."""


class Decoders(Decoding[Parcel]):
    """Pool of decoder processes. Each of them reads items of one trust domain only (`Group.domain`).

    A decoder that has read items is kept for its domain until many other domains have had items later. A spare decoder
    is always ready for an item of a new domain. If a decoder dies while it works on an item, another decoder tries the
    item once more. Canceling `plan` or `write` kills the item's decoder.
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
        self._number = 0
        """Maximum number of decoders that have jobs or are reserved."""
        self._max_used = 0
        """Maximum number of decoders that have read items."""
        self._processes: list[DecoderProcess] = []
        """Live decoders. Those that have read items are in the order of their last jobs."""
        self._missing = asyncio.Event()
        """Set if decoders may have to be forked."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromDecoder](FromDecoder)

    async def open(self, number: int) -> None:
        """Start decoders. `number` of them work at the same time. If one cannot be started, stop all of them.

        Raises:
            UnsupportedCheckpoint: No family supports the checkpoint.
            ProcessDied: The nursery cannot be started.

        """
        self._number = number
        self._max_used = number if self._caps.isolate_requests else max(number, _KEPT_DECODERS)
        try:
            await self._nursery.open()
            await gather([self._fork() for _ in range(number + 1)])
        except BaseException:
            await self.close()
            raise
        self._spawn(self._fill())
        self._spawn(self._watch())

    @property
    def pids(self) -> list[int]:
        """Process ids of the live decoders, including the spare one."""
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

    async def plan(self, group: Group, source: Parcel) -> Planned:
        reply, _ = await self._do(Job(group, source, asyncio.get_running_loop().create_future()))
        return cast("Planned", reply)

    async def digest(self, settings: str, source: Parcel, salt: str) -> bytes:
        return await off_loop(source.nbytes, lambda: parcel_digest(settings, source, salt))

    async def write(self, group: Group, source: Parcel, arrays: Mapping[str, NDArray[Any]]) -> None:
        job = Job(group, source, asyncio.get_running_loop().create_future(), layout_of(arrays))
        _, process = await self._do(job)
        try:
            num_bytes = sum(array.nbytes for array in arrays.values())
            await off_loop(num_bytes, lambda: process.scratch.move(job.written, arrays))
        except BaseException:
            if process in self._processes:  # its scratch memory may still contain the item
                self._kill(process)
            raise
        finally:
            job.written = {}
            process.job = None
            self._hand_out()

    def let_go(self, group: Group) -> None:
        for process in self._processes:
            if process.kept_for is group:
                process.kept_for = None
                self._hand_out()
                return

    async def close(self) -> None:
        """Stop all processes. All waiting and running jobs fail with NoProcess."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._nursery.close()
        self._queue.fail(_CLOSED)
        self._processes.clear()

    async def _do(self, job: Job) -> tuple[FromDecoder, DecoderProcess]:
        if why := _CLOSED if self._closed else self._nursery.hopeless:
            raise NoProcess(why)
        self._queue.add(job)
        try:
            self._hand_out()
            reply, process = await job.reply
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        if isinstance(reply, Refused):
            if reply.frames:
                # The indentation prevents a compromised decoder from forging lines of the log.
                _log.error("%s", textwrap.indent(f"{reply.error.message}\n{reply.frames}", "    ").strip())
            raise reply.error.exception()
        return reply, process

    def _give_up(self, job: Job) -> None:
        """Remove a job from the queue, or kill the decoder that works on it."""
        self._queue.remove(job)
        for process in [process for process in self._processes if process.job is job]:
            self._kill(process)

    def _hand_out(self) -> None:
        """Send waiting jobs to decoders, in the order of the groups' turns."""
        for process in [process for process in self._processes if process.awaits_job]:
            if process.kept_for is not None and process.kept_for in self._queue:
                self._send(process, self._queue.take(process.kept_for))
        while sum(not process.is_idle for process in self._processes) < self._number:
            idle = {process.domain: process for process in reversed(self._processes) if process.is_idle}
            group = next((group for group in self._queue if self._domain(group) in idle or None in idle), None)
            if group is None:
                return
            domain = self._domain(group)
            process = idle.get(domain) or self._unused(idle[None], domain)
            self._send(process, self._queue.take(group))

    def _unused(self, process: DecoderProcess, domain: Hashable) -> DecoderProcess:
        """Return `process`, which has read no item, for the items of `domain`, and end the decoder that it replaces."""
        used = [one for one in self._processes if one.domain is not None]
        if len(used) >= self._max_used:
            self._kill(next(one for one in used if one.is_idle))
        process.domain = domain
        self._missing.set()
        return process

    def _domain(self, group: Group) -> Hashable:
        return group if self._caps.isolate_requests else group.domain

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
        process.restart_clocks()
        self._processes.remove(process)
        self._processes.append(process)
        process.channel.send_with(self._encoder.encode(message), descriptors)

    async def _serve(self, process: DecoderProcess) -> None:
        """Receive the replies of `process` until it ends. If it ends during a job, retry or fail the job."""
        try:
            with logged(f"the connection to decoder {process.pid} failed"):
                try:
                    await self._receive(process)
                except (msgspec.MsgspecError, ValueError, MindieMMError) as invalid:
                    # A malicious item may have compromised the process, so the log gets only the start of the message.
                    _log.error("decoder %d sent an invalid reply and was killed: %.300r", process.pid, str(invalid))
            is_unexpected = process in self._processes
            if is_unexpected:  # it may still run if it closed the channel or sent an invalid message
                self._kill(process, 0.0 if process.domain is not None else _PAUSE_S)
            ended = await process.ended
            if is_unexpected:
                _log.warning("decoder %d died with status %s", process.pid, None if ended is None else ended.status)
        finally:
            await process.channel.close()
            process.scratch.close()
            if self._closed and process.job is not None:
                process.job.fail(NoProcess(_CLOSED))
        job = process.job
        if job is None or job.reply.done():
            return
        if error := job.final_error(ended, self._caps):
            job.fail(error)
            return
        job.is_second_try = True
        self._queue.put_back(job)
        self._hand_out()

    async def _receive(self, process: DecoderProcess) -> None:
        """Pass replies to their callers until the process dies.

        Raises:
            MsgspecError, ValueError, MindieMMError: The process has sent an invalid message.

        """
        while True:
            try:
                reply = self._decoder.decode(await process.channel.recv(_MAX_REPLY_BYTES))
            except EOFError:
                return
            job = process.job
            if process not in self._processes or (job is not None and job.reply.cancelled()):
                return  # it is being killed, and its item may already be another decoder's
            if job is None or job.reply.done() or isinstance(reply, Written if job.layout is None else Planned):
                raise OperationalError(f"the decoder sent an unexpected {type(reply).__name__}")
            process.restart_clocks()
            if isinstance(reply, Written):
                assert job.layout is not None
                job.written = process.scratch.arrays(job.layout)
            else:
                process.job = None  # `write` still has to copy the arrays of a `Written`
            if isinstance(reply, Planned):
                process.planned = job.parcel
                process.kept_for = job.group if job.group.keeps_decoder else None
            job.reply.set_result((reply, process))
            if isinstance(reply, Refused) and (job.layout is not None or _is_crash_or_limit(reply)):
                self._kill(process)  # and its scratch memory, to which it may have written a part of an item
            self._hand_out()

    def _kill(self, process: DecoderProcess, pause_s: float = 0.0) -> None:
        """Kill a decoder, and let another one be forked after `pause_s` seconds."""
        self._processes.remove(process)
        self._nursery.kill(process.pid)
        asyncio.get_running_loop().call_later(pause_s, self._missing.set)

    async def _watch(self) -> None:
        """End decoders that take too much time or memory, with a job or without, until canceled."""
        while True:
            await asyncio.sleep(_WATCH_S)
            with logged("the decoders cannot be watched"):
                for process in [*self._processes]:
                    why, error = process.excess(self._caps)
                    if not why:
                        continue
                    _log.error("decoder %d %s and was killed", process.pid, why)
                    if process.job is not None and error is not None:
                        process.job.fail(error)
                    self._kill(process)

    async def _fill(self) -> None:
        """Keep `number` decoders and a spare one running until canceled. Fork a new one whenever one is missing."""
        while True:
            await self._missing.wait()
            self._missing.clear()
            while len(self._processes) <= self._number or all(one.domain is not None for one in self._processes):
                with logged("a decoder cannot be forked"):
                    with suppress(ProcessDied):  # the next call waits for the next nursery
                        await self._fork()
                    continue
                await asyncio.sleep(_PAUSE_S)

    async def _fork(self) -> None:
        """Fork a decoder and send it a waiting job, if any. Raise ProcessDied if the nursery dies."""
        process = await self._nursery.fork()
        self._processes.append(process)
        self._spawn(self._serve(process))
        self._hand_out()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_crash_or_limit(refused: Refused) -> bool:
    """Return whether an unexpected error or a limit, such as those on memory and time, prevented the decoding."""
    return bool(refused.frames) or isinstance(refused.error.exception(), LimitExceeded)
