"""Progress of long-running operations.

`repeating` calls a function repeatedly while a `with` block runs. `LoadingText` says how much of a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOG_INTERVAL_S = 10.0
"""Time in seconds between two lines about the progress of a long-running operation."""


@contextmanager
def repeating(show: Callable[[], object], interval_s: float = LOG_INTERVAL_S) -> Iterator[None]:
    """Call `show` every `interval_s` seconds on another thread while the `with` block runs.

    `show` is not called at the start or at the end of the block.
    """
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


class LoadingText:
    """A text that says how much of a model is loaded. Call the instance to set the loaded share of the weights."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._share = 0.0

    def __call__(self, share: float) -> None:
        """Set the share of the weights that is loaded, from 0 to 1."""
        self._share = share

    def __str__(self) -> str:
        weights = f" ({self._share:.0%} of the weights)" if self._share else ""
        return f"loading the model{weights} for {time.monotonic() - self._began_s:.0f} s"
