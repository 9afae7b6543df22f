"""Whether somebody still waits for what is being read and decoded.

A tokenizer process, with one request at a time, is told as a whole. A thread is told of its own work. Both are asked at
each packet of a video or a sound, at each frame that was handed in, and while a pipe or an address gives nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mindie_mm.errors import RequestAborted

CHECK_S = 0.1
"""Seconds between two questions of one who waits for data."""

_own = threading.local()
_cancelled = False
"""No Event: its lock may be held where the signal comes."""


def cancel() -> None:
    """Nobody waits any more for the request in work. To be called in a signal's handler."""
    global _cancelled  # noqa: PLW0603 - a handler has nothing else to reach
    _cancelled = True


def begin() -> None:
    """Another request is in work."""
    global _cancelled  # noqa: PLW0603
    _cancelled = False


@contextmanager
def until(given_up: threading.Event) -> Iterator[None]:
    """Work on this thread for somebody who sets `given_up` when the result is not wanted any more."""
    _own.given_up = given_up
    try:
        yield
    finally:
        del _own.given_up


def check() -> None:
    """RequestAborted where nobody waits."""
    given_up = getattr(_own, "given_up", None)
    if _cancelled or (given_up is not None and given_up.is_set()):
        raise RequestAborted("the request was given up while its media were decoded")
