"""Progress of commands on standard error: live on a terminal, else a line every 10 s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from mindie_mm.processes.progress import LOG_INTERVAL_S, LoadingText, repeating

_FRAME_S = 0.25
"""Time in seconds between two updates of a terminal. Work that ends earlier shows nothing."""


@contextmanager
def progress_shown(text: Callable[[], str], interval_s: float = LOG_INTERVAL_S) -> Iterator[None]:
    """Show the current result of `text` while the block runs.

    Args:
        text: Function that describes the progress in one line. It is called on another thread.
        interval_s: Time in seconds between two lines if standard error is not a terminal.

    """
    if not sys.stderr.isatty():
        with repeating(lambda: click.echo(text(), err=True), interval_s):
            yield
        return
    with ExitStack() as drawing, repeating(_Live(drawing, text).update, _FRAME_S):
        yield


class _Live:
    """A line with a spinner that rich draws. It begins at the first update, because rich is slow to import."""

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
    """Show how much of the model is loaded. Yield the function that takes the share."""
    loading = LoadingText()
    with progress_shown(loading.__str__):
        yield loading
