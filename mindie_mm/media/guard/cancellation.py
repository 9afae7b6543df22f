"""Whether somebody still waits for what a thread reads and decodes.

A thread asks at each packet of a video or a sound, at each frame that was handed in, and while a pipe or an address
gives nothing. A decoder process is killed instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mindie_mm.errors import RequestAborted

CHECK_S = 0.1
"""Time in seconds between two questions of a thread that waits for data."""

_own = threading.local()


@contextmanager
def until(given_up: threading.Event) -> Iterator[None]:
    """Work on this thread for somebody who sets `given_up` when the result is not wanted any more."""
    _own.given_up = given_up
    try:
        yield
    finally:
        del _own.given_up


def check() -> None:
    """Raise RequestAborted if nobody waits for this thread's work."""
    given_up = getattr(_own, "given_up", None)
    if given_up is not None and given_up.is_set():
        raise RequestAborted("the request was given up while its media were decoded")
