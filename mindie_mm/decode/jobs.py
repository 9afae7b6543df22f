"""Jobs of decoder processes, and the queue of jobs."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field

from mindie_mm.decode.decoder_messages import FromDecoder
from mindie_mm.decode.parcel import Parcel
from mindie_mm.decode.scratch import Layout, Scratch
from mindie_mm.errors import LimitExceeded, MediaError, MindieMMError, NoProcess, ProcessDied
from mindie_mm.processes.ipc import Channel
from mindie_mm.settings.config import MediaCaps

_FAULTS_OF_THE_ITEM = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that indicate that the item crashed the decoder. SIGKILL is not listed: it may come from the OOM killer."""


@dataclass(slots=True, eq=False)
class Group:
    """Items of one request. Groups take turns, so that a request with many items does not delay other requests."""

    keeps_decoder: bool = False
    """True if a decoder that has planned an item of this group stays reserved for it until `Decoders.let_go`."""
    files: ExitStack = field(default_factory=ExitStack)
    """Closes the files of the items. They stay open until the request is done, so that an item can be read again."""


@dataclass(slots=True, eq=False)
class Job:
    """Media item to plan or to write."""

    group: Group
    parcel: Parcel
    reply: asyncio.Future[tuple[FromDecoder, DecoderProcess]]
    layout: Layout | None = None
    """Layout of the item's arrays in the scratch memory. None if the job is to plan the item."""
    is_second_try: bool = False

    def fail(self, error: MindieMMError) -> None:
        """Complete `reply` with `error`, unless it is complete already."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def final_error(self, status: int | None, caps: MediaCaps) -> MindieMMError | None:
        """Return the error for an item whose decoder died with `status`, or None to try the item again."""
        if status == -signal.SIGXCPU:
            is_page = self.parcel.media.page is not None
            limit_s, name = (caps.max_pdf_page_s, "pdf-page") if is_page else (caps.max_decode_s, "decode")
            return LimitExceeded(f"decoding takes more processor time than the limit of {limit_s:g} s (--max-{name}-s)")
        if not self.is_second_try:
            return None
        if status is not None and -status in _FAULTS_OF_THE_ITEM:
            return MediaError(f"the item crashed two decoders; the second died with {signal.Signals(-status).name}")
        return ProcessDied(f"two decoders died while decoding the item; the second died with status {status}")


@dataclass(slots=True, eq=False)
class DecoderProcess:
    """Decoder process and its state."""

    pid: int
    channel: Channel
    status: asyncio.Future[int | None]
    """Future of the exit status that the nursery reports. The result is None if the status is unknown."""
    scratch: Scratch
    job: Job | None = None
    """Job in progress."""
    planned: Parcel | None = None
    """Item whose plan the decoder keeps."""
    kept_for: Group | None = None
    """Group that the decoder is reserved for. The next job of the group runs on this decoder."""
    killed: bool = False
    """True if the decoder was killed because its job was canceled."""


class JobQueue:
    """Queue of waiting jobs, in which groups take turns."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Group, deque[Job]] = OrderedDict()

    def add(self, job: Job) -> None:
        """Append a job to the jobs of its group."""
        self._jobs.setdefault(job.group, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """Put a job at the front of the queue."""
        self._jobs.setdefault(job.group, deque()).appendleft(job)
        self._jobs.move_to_end(job.group, last=False)

    def next(self, kept_for: Group | None) -> Job | None:
        """Remove and return the next job. If `kept_for` is a group, consider only jobs of this group."""
        for group in self._jobs:
            if kept_for in (None, group):
                jobs = self._jobs.pop(group)
                job = jobs.popleft()
                if jobs:
                    self._jobs[group] = jobs  # after the other groups
                return job
        return None

    def drop(self, job: Job) -> None:
        """Remove a job if it is in the queue."""
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
