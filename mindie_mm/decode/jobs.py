"""Items to plan or to write, the decoder processes that do so, and the queue between them."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict, deque
from dataclasses import dataclass

from mindie_mm.decode.decoder_messages import FromDecoder, Item
from mindie_mm.decode.scratch import Layout, Scratch
from mindie_mm.errors import LimitExceeded, MediaError, MindieMMError, NoProcess, ProcessDied
from mindie_mm.processes.ipc import Channel

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
class Job:
    """An item to plan or to write."""

    group: Group
    item: Item
    descriptor: int
    reply: asyncio.Future[tuple[FromDecoder, DecoderProcess]]
    layout: Layout | None = None
    """Where its arrays are to lie. None: plan the item."""
    is_second_try: bool = False

    def fail(self, error: MindieMMError) -> None:
        """Raise `error` where the reply is awaited, unless there is one."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def final_error(self, status: int | None, max_decode_s: float) -> MindieMMError | None:
        """Return the error of an item whose decoder died with `status`, or None if the item is tried again."""
        if status == -signal.SIGXCPU:
            return LimitExceeded(
                f"decoding takes more than {max_decode_s:g} s of processor time, the limit (--max-decode-s)"
            )
        if not self.is_second_try:
            return None
        if status is not None and -status in _FAULTS_OF_THE_ITEM:
            return MediaError(f"it has ended two decoders, the last with {signal.Signals(-status).name}")
        return ProcessDied(f"two decoders died while they decoded it, the last with status {status}")


@dataclass(slots=True, eq=False)
class DecoderProcess:
    """A decoder process."""

    pid: int
    channel: Channel
    status: asyncio.Future[int | None]
    """Exit status, once the nursery has told it. None if it is unknown."""
    scratch: Scratch
    job: Job | None = None
    """Job in progress."""
    planned: Item | None = None
    """The item whose plan it holds."""
    kept_for: Group | None = None
    """The group whose next item it gets."""
    killed: bool = False
    """Whether it was killed because nobody waits for its item any more."""


class JobQueue:
    """Items that no decoder has, by their groups, which take turns."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Group, deque[Job]] = OrderedDict()

    def add(self, job: Job) -> None:
        """Append a job to those of its group."""
        self._jobs.setdefault(job.group, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """Make a job the next one of all."""
        self._jobs.setdefault(job.group, deque()).appendleft(job)
        self._jobs.move_to_end(job.group, last=False)

    def next(self, kept_for: Group | None) -> Job | None:
        """Take the next job out of the queue: of `kept_for` alone, if that is a group."""
        for group in self._jobs:
            if kept_for in (None, group):
                jobs = self._jobs.pop(group)
                job = jobs.popleft()
                if jobs:
                    self._jobs[group] = jobs  # at the end
                return job
        return None

    def drop(self, job: Job) -> None:
        """Remove a job, if it waits."""
        jobs = self._jobs.get(job.group, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[job.group]

    def fail(self, why: str) -> None:
        """Fail all jobs with NoProcess."""
        while self._jobs:
            for job in self._jobs.popitem()[1]:
                job.fail(NoProcess(why))
