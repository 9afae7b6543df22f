"""Cancellation of work in a thread whose request was given up.

A thread calls `check` at each packet of a video or audio stream and at each frame that the caller supplies. It also
does so while a pipe or a URL delivers no data. Decoder processes are killed instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mindie_mm.errors import RequestAborted

CHECK_S = 0.1
"""Interval in seconds between checks while a thread waits for data."""

_own = threading.local()


@contextmanager
def until(given_up: threading.Event) -> Iterator[None]:
    """Make `check` raise in this thread once `given_up` is set, because the result is no longer wanted."""
    _own.given_up = given_up
    try:
        yield
    finally:
        del _own.given_up


def check() -> None:
    """Raise RequestAborted if the request that this thread works for was given up."""
    given_up = getattr(_own, "given_up", None)
    if given_up is not None and given_up.is_set():
        raise RequestAborted("the request was aborted while its media were being decoded")
