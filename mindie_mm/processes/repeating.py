"""Calls at intervals while a block runs, such as to show its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOG_INTERVAL_S = 10.0
"""Time in seconds between two lines about the progress of long work."""


@contextmanager
def repeating(show: Callable[[], object], interval_s: float = LOG_INTERVAL_S) -> Iterator[None]:
    """Call `show` every `interval_s` seconds on another thread while the block runs, but not at its start and end."""
    ended = Event()

    def run() -> None:
        while not ended.wait(interval_s):
            show()

    thread = Thread(target=run, name="progress", daemon=True)  # the block itself may be busy for a long time
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
