"""Quotas for the spooled media of requests, and the errors when the spool has no room."""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mindie_mm.errors import LimitExceeded, SharedMemoryError, SpoolFull
from mindie_mm.media.fetch.threads import Threads
from mindie_mm.shm import make_spool

_log = logging.getLogger(__name__)

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Error numbers for a process or a system without a free file descriptor."""
PROBE_S = 5.0
"""Maximum time in seconds for writing a file to the spool. A slower file system counts as out of order."""
_PROBE_BYTES = 4096


class MediaQuota:
    """The number of bytes in the spool, at most `request_limit` per request and `limit` in total."""

    def __init__(self, request_limit: int, limit: int) -> None:
        self._request_limit = request_limit
        self._limit = limit
        self._requests: dict[str, int] = {}
        self._lock = threading.Lock()  # files are copied on threads

    def spend(self, request: str, num_bytes: int) -> None:
        """Count `num_bytes` more for `request`. Above a limit, raise LimitExceeded or SpoolFull and count nothing."""
        with self._lock:
            own = self._requests.get(request, 0) + num_bytes
            whole = sum(self._requests.values()) + num_bytes
            if own > self._request_limit:
                raise LimitExceeded(f"the request's media have {own} bytes; the limit is {self._request_limit}")
            if whole > self._limit:
                raise SpoolFull(f"the media of all requests in progress have {whole} bytes; the limit is {self._limit}")
            self._requests[request] = own

    def give_back(self, request: str) -> None:
        """Subtract all bytes of `request`, which may have none."""
        with self._lock:
            self._requests.pop(request, None)


class ItemQuota:
    """The number of bytes in all files of one media item, at most `limit`. A list of frames has many files."""

    def __init__(self, limit: int, spend: Callable[[int], None]) -> None:
        """Create a quota. `spend` counts the bytes for the request."""
        self._limit = limit
        self._spend = spend
        self._spent = 0
        self._lock = threading.Lock()

    def spend(self, num_bytes: int) -> None:
        """Count `num_bytes` more. Raise LimitExceeded above the limit, or an error of the request's own `spend`."""
        with self._lock:
            self._spent += num_bytes
            if self._spent > self._limit:
                raise LimitExceeded(
                    f"the item has at least {self._spent} bytes; the limit for one item is {self._limit}"
                )
        self._spend(num_bytes)


@contextmanager
def room_to_spool() -> Iterator[None]:
    """Turn any error of writing to the spool into SpoolFull.

    The log names the path. The message does not, because clients need not know it.
    """
    try:
        yield
    except (OSError, SharedMemoryError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        _log.warning("the spool cannot be written: %s", error)
        raise SpoolFull(f"the spool cannot be written: {reason or 'its folder cannot be used'}") from error


class SpoolProbe:
    """A check of the spool that writes a file."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._threads = Threads("spool-probe")
        self._writing: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raise SpoolFull, with the reason, if no file can be written. Concurrent callers share one attempt."""
        writing = self._writing  # another caller may replace the attribute while this one waits
        if writing is None or writing.done():
            writing = self._writing = asyncio.ensure_future(self._threads.run(self._write))
        done, _ = await asyncio.wait([writing], timeout=PROBE_S)
        if not done:
            raise SpoolFull(f"the spool cannot be written: its file system has not responded for {PROBE_S:g} s")
        with room_to_spool():
            writing.result()

    def _write(self) -> None:
        make_spool(self._spool)  # requests do the same
        with tempfile.TemporaryFile(dir=self._spool, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
