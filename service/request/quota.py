"""Limits on the spooled media of requests, and the errors that report a full spool."""

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
"""Error numbers that report a lack of file descriptors in the process or in the whole system."""
PROBE_S = 5.0
"""Maximum time in seconds for writing a file to the spool. A slower file system counts as failed."""
_PROBE_BYTES = 4096


class MediaQuota:
    """Counts the bytes in the spool: at most `request_limit` per request, and at most `limit` in total."""

    def __init__(self, request_limit: int, limit: int) -> None:
        self._request_limit = request_limit
        self._limit = limit
        self._requests: dict[str, int] = {}
        self._lock = threading.Lock()  # files are copied on threads

    def spend(self, request: str, num_bytes: int) -> None:
        """Add `num_bytes` to the count of `request`. Raise LimitExceeded or SpoolFull if that would exceed a limit."""
        with self._lock:
            own = self._requests.get(request, 0) + num_bytes
            whole = sum(self._requests.values()) + num_bytes
            if own > self._request_limit:
                raise LimitExceeded(f"the request's media would total {own} bytes; the limit is {self._request_limit}")
            if whole > self._limit:
                raise SpoolFull(
                    f"the media of all requests in progress would total {whole} bytes; the limit is {self._limit}"
                )
            self._requests[request] = own

    def free(self, request: str) -> None:
        """Reset the count of `request` to zero."""
        with self._lock:
            self._requests.pop(request, None)


class ItemQuota:
    """Counts the bytes in all files of one media item, at most `limit`. A list of frames consists of many files."""

    def __init__(self, limit: int, spend: Callable[[int], None]) -> None:
        """Create a quota. `spend` counts the bytes for the request."""
        self._limit = limit
        self._spend = spend
        self._spent = 0
        self._lock = threading.Lock()

    def spend(self, num_bytes: int) -> None:
        """Add `num_bytes` to the counts of the item and of the request. Raise LimitExceeded or SpoolFull at a limit."""
        with self._lock:
            self._spent += num_bytes
            if self._spent > self._limit:
                raise LimitExceeded(
                    f"the item has at least {self._spent} bytes; the limit for one item is {self._limit}"
                )
        self._spend(num_bytes)


@contextmanager
def room_to_spool() -> Iterator[None]:
    """Turn any error that occurs while writing to the spool into SpoolFull.

    The path is logged, but is left out of the message, because clients should not see the server's paths.
    """
    try:
        yield
    except (OSError, SharedMemoryError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        _log.warning("the service cannot write to the spool: %s", error)
        raise SpoolFull(f"the service cannot write to the spool: {reason or 'see the log of the service'}") from error


class SpoolProbe:
    """Checks the spool by writing a file."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._threads = Threads("spool-probe")
        self._writing: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raise SpoolFull if no file can be written. Concurrent callers share one attempt."""
        writing = self._writing  # another caller may replace the attribute while this one waits
        if writing is None or writing.done():
            writing = self._writing = asyncio.ensure_future(self._threads.run(self._write))
        done, _ = await asyncio.wait([writing], timeout=PROBE_S)
        if not done:
            raise SpoolFull(
                f"the service cannot write to the spool: its file system has not responded for {PROBE_S:g} s"
            )
        with room_to_spool():
            writing.result()

    def _write(self) -> None:
        make_spool(self._spool)  # as each request does
        with tempfile.TemporaryFile(dir=self._spool, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
