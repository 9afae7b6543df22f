"""Decoder processes, their jobs, and the queue of jobs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import Ended, FromDecoder
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

_SHARE_AT_CRASH = 4
"""A crash of a library is due to the memory limit if the decoder had a quarter of this memory or more. A list that
doubles needs three times its memory, and address space without contents counts toward the limit, too."""

_IDLE_S, _IDLE_BYTES = 1.0, 2**28
"""Processor time in seconds that a decoder may use without a job, and memory in bytes that it may keep.

With a job, a decoder may have `_IDLE_BYTES` more than the limit. RLIMIT_DATA is reached first, unless page tables
have grown, which it does not count.
"""

_HANG_S, _WALL_PER_PROCESSOR_S = 60.0, 10.0
"""Time that a job may take, in seconds and per second of processor time. Together with the limit on processor time,
they also end a decoder that sleeps or waits."""


@dataclass(slots=True, eq=False)
class Group:
    """Items of one request. Groups take turns, so that a request with many items does not delay other requests."""

    domain: Hashable = ()
    """Trust domain. A decoder reads only items of one domain, and is then replaced."""
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
    written: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays in the scratch memory after a write. They keep the memory mapped, even if the decoder ends."""
    is_second_try: bool = False

    def fail(self, error: MindieMMError) -> None:
        """Complete `reply` with `error`, unless it is complete already."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def final_error(self, ended: Ended | None, caps: MediaCaps) -> MindieMMError | None:
        """Return the error for an item whose decoder died as in `ended`, or None to try the item again."""
        status, grown_bytes = (None, 0) if ended is None else (ended.status, ended.grown_bytes)
        fault = "" if status is None or -status not in _FAULTS_OF_THE_ITEM else signal.Signals(-status).name
        if fault and 0 < caps.max_decode_bytes <= _SHARE_AT_CRASH * grown_bytes:
            return LimitExceeded(
                f"decoding the item needs more memory than the limit of {caps.max_decode_bytes} bytes "
                f"(--max-decode-bytes); the decoder died with {fault} when it used {grown_bytes} bytes"
            )
        if not self.is_second_try:
            return None
        if fault:
            return MediaError(f"the item crashed two decoders; the second died with {fault}")
        return ProcessDied(f"two decoders died while decoding the item; the second died with status {status}")

    def took_too_long(self, caps: MediaCaps) -> LimitExceeded:
        """Return the error for an item that takes more processor time than its limit."""
        name = "decode" if self.parcel.media.page is None else "pdf-page"
        limit_s = self.parcel.limit_s(caps)
        return LimitExceeded(f"decoding takes more processor time than the limit of {limit_s:g} s (--max-{name}-s)")


@dataclass(slots=True, eq=False)
class DecoderProcess:
    """Decoder process and its state."""

    pid: int
    channel: Channel
    ended: asyncio.Future[Ended | None]
    """Future of the nursery's report that the decoder has exited. The result is None if the nursery died before."""
    scratch: Scratch
    domain: Hashable = None
    """Trust domain of the items that the decoder has read. None if it has read none."""
    job: Job | None = None
    """Job in progress."""
    planned: Parcel | None = None
    """Item whose plan the decoder keeps."""
    kept_for: Group | None = None
    """Group that the decoder is reserved for. The next job of the group runs on this decoder."""
    since_s: float = 0.0
    """Time when the decoder got its job or became idle, as returned by time.monotonic."""
    used_before_s: float = 0.0
    """Processor time that the decoder had used at this time, in seconds."""

    first_bytes: int = 0
    """Memory of the decoder after the fork, in bytes."""

    def __post_init__(self) -> None:
        self.first_bytes = _charged_bytes(self.pid)
        self.restart_clocks()

    @property
    def is_idle(self) -> bool:
        """True if any job of the decoder's domain may be sent to the decoder."""
        return self.awaits_job and self.kept_for is None

    @property
    def awaits_job(self) -> bool:
        """True if the decoder is alive and has no job. It may be reserved."""
        return self.job is None and not self.ended.done()

    def restart_clocks(self) -> None:
        """Measure the times of `excess` from now on."""
        self.since_s, self.used_before_s = time.monotonic(), _processor_s(self.pid)

    def excess(self, caps: MediaCaps) -> tuple[str, MindieMMError | None]:
        """Return why the decoder must be ended, or "" if it may continue.

        Also return the error for its job, or None if another decoder should try the job again.
        """
        used_s, job = _processor_s(self.pid) - self.used_before_s, self.job
        grown_bytes, limit_bytes = _charged_bytes(self.pid) - self.first_bytes, caps.max_decode_bytes
        if limit_bytes and grown_bytes > limit_bytes + _IDLE_BYTES:
            return f"uses {grown_bytes} bytes of memory", LimitExceeded(
                f"decoding the item needs more memory than the limit of {limit_bytes} bytes (--max-decode-bytes)"
            )
        if job is None or job.reply.done():
            if self.planned is None and grown_bytes > _IDLE_BYTES:
                return "keeps memory without a job", None
            return ("has used processor time without a job" if used_s > _IDLE_S else ""), None
        if used_s > job.parcel.limit_s(caps):
            return "has exceeded its processor time", job.took_too_long(caps)
        wall_s = time.monotonic() - self.since_s
        return (
            f"made no progress for {wall_s:.0f} s" if wall_s > _HANG_S + _WALL_PER_PROCESSOR_S * used_s else ""
        ), None


def _charged_bytes(pid: int) -> int:
    """Return the size of the private memory and the page tables of a process, or 0 if the process has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(1024 * int(number) for number in re.findall(r"(?:RssAnon|VmPTE):\s+(\d+)", status))


def _processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds, or 0 if the process has exited."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
    except OSError:
        return 0.0


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

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups with jobs, in the order of their turns."""
        return iter(self._jobs)

    def __contains__(self, group: Group) -> bool:
        return group in self._jobs

    def take(self, group: Group) -> Job:
        """Remove and return the next job of `group`. The next turn of the group comes after the other groups."""
        jobs = self._jobs.pop(group)
        job = jobs.popleft()
        if jobs:
            self._jobs[group] = jobs
        return job

    def remove(self, job: Job) -> None:
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
