"""Tests for a run's progress display, which is updated at fixed intervals and not for each row."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from mindie_mm.batch.progress import JSON_INTERVAL_S, LOG_INTERVAL_S, Progress, Rates, shown

DONE, EARLIER = Progress(300, 2, 5_000_000, 0.75), Progress(100, 1, 1_000_000, 0.25)


class Lines(io.StringIO):
    """A stream that releases a semaphore whenever it is flushed, which happens once per line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Semaphore(0)

    def flush(self) -> None:
        self.written.release()


def test_the_intervals_match_the_documentation() -> None:
    assert (LOG_INTERVAL_S, JSON_INTERVAL_S) == (10, 1)


@pytest.mark.parametrize("style", ["auto", "json"])
def test_lines_are_printed_by_time_without_new_rows(style) -> None:
    out = Lines()
    with shown(style, out, interval_s=0.01) as show:
        show(DONE, EARLIER)
        assert all(out.written.acquire(timeout=300) for _ in range(3))
    lines = out.getvalue().splitlines()
    if style == "auto":
        assert re.fullmatch(r"300 rows, 2 failed, [\d.]+ rows/s, [\d.]+ MB/s, 75%, [\d:]+ left", lines[-1])
        return
    last = json.loads(lines[-1])
    assert list(last) == [
        "rows", "errors", "bytes", "resumed_rows", "share", "elapsed_s", "rows_per_s", "megabytes_per_s", "eta_s"
    ]  # fmt: skip
    assert (last["rows"], last["errors"], last["resumed_rows"], last["share"]) == (300, 2, 100, 0.75)


def test_the_end_is_shown_exactly_once() -> None:
    out = Lines()

    def fail() -> None:
        with shown("auto", out, interval_s=1000) as show:
            show(DONE, EARLIER)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(out.getvalue().splitlines()) == 1


@pytest.mark.parametrize("style", ["auto", "json"])
def test_a_refused_run_shows_nothing(style, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, even an empty bar would leave a line."""

    def refuse(out: TextIO) -> None:
        with shown(style, out, interval_s=0.001):
            raise KeyError

    out = Lines()
    with pytest.raises(KeyError):
        refuse(out)
    assert out.getvalue() == ""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(KeyError):
            refuse(terminal)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        assert b"".join(read_to_the_end(screen)) == b""


def test_rates_exclude_rows_of_earlier_calls() -> None:
    assert Rates.of(DONE, EARLIER, 10.0) == Rates(20.0, 0.4, 5.0)
    assert Rates.of(EARLIER, EARLIER, 10.0) == Rates(0.0, 0.0, None)


def read_to_the_end(screen: io.RawIOBase) -> Iterator[bytes]:
    """Yield the output of a terminal in parts. When the terminal is closed, reading fails with EIO."""
    with suppress(OSError):
        yield from iter(lambda: screen.read(4096), b"")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with shown("auto", terminal) as show:
            show(DONE, EARLIER)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        drawn = b"".join(read_to_the_end(screen)).decode()
    assert "300 rows, 2 failed" in drawn
    assert "━" in drawn
