"""Shows the progress of a run on a terminal, in a log or to another program."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO, get_args

import msgspec

from mindie_mm.errors import InputError
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.progress import LOG_INTERVAL_S, repeating

JSON_INTERVAL_S = 1.0

Style = Literal["auto", "json", "off"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Amount of work that has been done."""

    rows: int = 0
    errors: int = 0
    num_bytes: int = 0
    """Size of the arrays in bytes."""
    share: float = 0.0
    """Finished fraction of the input, from 0 to 1. The size of the input is measured in bytes or in rows."""

    def __add__(self, other: Progress) -> Progress:
        return Progress(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: Progress) -> Progress:
        return Progress(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


class Show(Protocol):
    """Callback for each row. The callback decides when and how to show the progress."""

    def __call__(self, done: Progress, earlier: Progress) -> None:
        """Receive the progress. `done` is all finished work, and `earlier` is the part that earlier calls did."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a run."""

    rows_per_s: float
    megabytes_per_s: float
    eta_s: float | None
    """Remaining time in seconds, or None until this call has done some work."""

    @classmethod
    def of(cls, done: Progress, earlier: Progress, elapsed_s: float) -> Rates:
        """Return the rates of this call, without the work of `earlier` calls."""
        own, elapsed_s = done - earlier, max(elapsed_s, 1e-9)
        eta_s = elapsed_s * max(0.0, 1 - done.share) / own.share if own.share > 0 else None
        return cls(own.rows / elapsed_s, own.num_bytes / elapsed_s / 1e6, eta_s)


def is_shown(style: Style | None) -> bool:
    """Return whether progress in a style is shown on standard error.

    Raises:
        InputError: There is no such style.

    """
    if style is not None and style not in get_args(Style):
        raise InputError(f"progress={style!r} must be 'auto', 'json' or 'off'")
    return style != "off" and (style is not None or (sys.stderr is not None and sys.stderr.isatty()))


@contextmanager
def shown(style: Style | None, out: TextIO = sys.stderr, interval_s: float | None = None) -> Iterator[Show]:
    """Show the progress of a run at intervals, and at its end.

    Nothing is shown for a run that is refused, because it never calls `Show`.

    Args:
        style: "auto" draws a bar if `out` is a terminal, and otherwise prints a line every 10 s. "json" prints an
            object every second. "off" shows nothing. None is "auto" if standard error is a terminal, and else "off".
        out: Stream to print to.
        interval_s: Time in seconds between two lines or objects. The default depends on the style.

    """
    if not is_shown(style):
        yield lambda *_: None
        return
    if style != "json" and out.isatty():
        with _bar() as drawn:
            yield drawn
        return
    write, pause_s = (_json, JSON_INTERVAL_S) if style == "json" else (_line, LOG_INTERVAL_S)
    began = time.monotonic()
    last: tuple[Progress, Progress] | None = None

    def show(done: Progress, earlier: Progress) -> None:
        nonlocal last
        last = (done, earlier)

    def print_now() -> None:
        if last is not None:
            print(write(*last, time.monotonic() - began), file=out, flush=True)

    try:
        with repeating(print_now, interval_s or pause_s):
            yield show
    finally:
        print_now()


def _json(done: Progress, earlier: Progress, elapsed_s: float) -> str:
    rates = Rates.of(done, earlier, elapsed_s)
    numbers = {
        "rows": done.rows,
        "errors": done.errors,
        "bytes": done.num_bytes,
        "resumed_rows": earlier.rows,
        "share": round(done.share, 6),
        "elapsed_s": round(elapsed_s, 3),
        "rows_per_s": round(rates.rows_per_s, 2),
        "megabytes_per_s": round(rates.megabytes_per_s, 2),
        "eta_s": None if rates.eta_s is None else round(rates.eta_s, 1),
    }
    return msgspec.json.encode(numbers).decode()


def _line(done: Progress, earlier: Progress, elapsed_s: float) -> str:
    rates = Rates.of(done, earlier, elapsed_s)
    eta = "" if rates.eta_s is None else f", {_duration(rates.eta_s)} left"
    blocks = f"{rates.megabytes_per_s:.1f} MB/s, " if done.num_bytes else ""
    rows = counted(done.rows, "row")
    return f"{rows}, {done.errors} failed, {rates.rows_per_s:.1f} rows/s, {blocks}{done.share:.0%}{eta}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    began = time.monotonic()
    with ExitStack() as drawing:
        bar = Bar(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True))

        def show(done: Progress, earlier: Progress) -> None:
            if not bar.tasks:  # even an empty bar would leave a line
                drawing.enter_context(bar)
                bar.add_task("", total=1.0)
            line = _line(done, earlier, time.monotonic() - began)
            bar.update(bar.tasks[0].id, completed=done.share, description=line)

        yield show
