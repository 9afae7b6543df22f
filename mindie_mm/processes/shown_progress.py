"""Progress on standard error: a live line on a terminal, and otherwise a new line every 10 s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mindie_mm.processes.progress import LOG_INTERVAL_S, LoadingText, repeating

_FRAME_S = 0.25
"""Time in seconds between two updates of a terminal. Work that ends before the first update shows nothing."""


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
