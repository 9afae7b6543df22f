"""How much room requests' media take as files, and what is said where there is no more."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mindie_mm.errors import LimitExceeded, SharedMemoryError, SpoolFull

_log = logging.getLogger(__name__)

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors by which a process or the system has no more files."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class Spending:
    """Bytes that requests have in the spool: each at most `request_limit`, all of them at most `limit`."""

    def __init__(self, request_limit: int, limit: int) -> None:
        self._request_limit = request_limit
        self._limit = limit
        self._requests: dict[str, int] = {}
        self._lock = threading.Lock()  # files are copied on threads

    def spend(self, request: str, num_bytes: int) -> None:
        """Counts further bytes; LimitExceeded or SpoolFull, and nothing is counted, above a limit."""
        with self._lock:
            own = self._requests.get(request, 0) + num_bytes
            whole = sum(self._requests.values()) + num_bytes
            if own > self._request_limit:
                raise LimitExceeded(f"the request's media take {own} bytes, the limit is {self._request_limit}")
            if whole > self._limit:
                raise SpoolFull(f"the media of all requests take {whole} bytes, the limit is {self._limit}")
            self._requests[request] = own

    def give_back(self, request: str) -> None:
        """Counts the request's bytes no longer, if there are any."""
        with self._lock:
            self._requests.pop(request, None)


class ItemSpending:
    """Bytes of one media item's files, of which a list of frames has many: at most `limit`."""

    def __init__(self, limit: int, spend: Callable[[int], None]) -> None:
        """`spend` counts them for the request."""
        self._limit = limit
        self._spend = spend
        self._spent = 0
        self._lock = threading.Lock()

    def spend(self, num_bytes: int) -> None:
        """Counts further bytes; LimitExceeded above the limit, and what `spend` raises."""
        with self._lock:
            self._spent += num_bytes
            if self._spent > self._limit:
                raise LimitExceeded(f"{self._spent} bytes, the limit for one item is {self._limit}")
        self._spend(num_bytes)


@contextmanager
def room_to_spool() -> Iterator[None]:
    """SpoolFull in the place of an error by which the system has no more room, or no more files."""
    try:
        yield
    except (OSError, SharedMemoryError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _NO_ROOM | NO_FILES:
            raise
        _log.warning("the spool takes no more: %s", cause.strerror)
        raise SpoolFull(f"the spool takes no more: {cause.strerror}") from error
