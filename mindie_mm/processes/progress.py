"""Progress of long-running operations, and its display on standard error.

On a terminal, a live line shows the progress. Otherwise, a new line shows it every 10 s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import Any

LOG_INTERVAL_S = 10.0
"""Time in seconds between two lines about the progress of a long-running operation."""
_FRAME_S = 0.25
"""Time in seconds between two updates of a terminal. Work that ends before the first update shows nothing."""


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
    """A string that says how much of a model is loaded. Call the instance to set the loaded share of the weights."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._share = 0.0

    def __call__(self, share: float) -> None:
        """Set the share of the weights that is loaded, from 0 to 1."""
        self._share = share

    def __str__(self) -> str:
        weights = f" ({self._share:.0%} of the weights)" if self._share else ""
        return f"loading the model{weights} for {time.monotonic() - self._began_s:.0f} s"


@contextmanager
def progress_shown(text: Callable[[], str], interval_s: float = LOG_INTERVAL_S) -> Iterator[None]:
    """Show the current result of `text` while the block runs.

    Args:
        text: Function that describes the progress in one line. It is called on another thread.
        interval_s: Time in seconds between two lines if standard error is not a terminal.

    """
    if not sys.stderr.isatty():
        with repeating(lambda: print(text(), file=sys.stderr, flush=True), interval_s):
            yield
        return
    with ExitStack() as drawing, repeating(_Live(drawing, text).update, _FRAME_S):
        yield


class _Live:
    """A line with a spinner, drawn by rich. rich is slow to import, so it is imported at the first update."""

    def __init__(self, drawing: ExitStack, text: Callable[[], str]) -> None:
        self._drawing = drawing
        self._text = text
        self._status: Any = None

    def update(self) -> None:
        if self._status is None:
            from rich.console import Console

            self._status = self._drawing.enter_context(Console(stderr=True).status(self._text()))
        self._status.update(self._text())


@contextmanager
def loading_shown() -> Iterator[LoadingText]:
    """Show how much of the model is loaded. Yield a function that sets the loaded share, from 0 to 1."""
    loading = LoadingText()
    with progress_shown(loading.__str__):
        yield loading
