"""Cancellation of decoding in a thread after its request was aborted.

A thread calls `check` for each packet of a video or audio stream, for each frame that the caller supplies, and while it
waits for data from a pipe or a URL. Decoder processes do not need this, because they can be killed.
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
    """Make `check` raise in this thread after `given_up` has been set. The event means that the request was aborted."""
    _own.given_up = given_up
    try:
        yield
    finally:
        del _own.given_up


def check() -> None:
    """Raise RequestAborted if the request that this thread works for was aborted."""
    given_up = getattr(_own, "given_up", None)
    if given_up is not None and given_up.is_set():
        raise RequestAborted("the request was aborted while its media were being decoded")
