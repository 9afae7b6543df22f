"""Tests for the progress that commands show on standard error."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from mindie_mm.models import load_model
from mindie_mm.nn.weights.loading import loading_reported
from mindie_mm.processes.progress import LOG_INTERVAL_S, progress_shown


class Stream(io.StringIO):
    """A text stream that counts calls to `write` with a semaphore, and that can pretend to be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Semaphore(0)

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.written.release()
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_line_at_intervals_or_live(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOG_INTERVAL_S == 10
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    done = iter(range(10**9))
    with progress_shown(lambda: f"{next(done)} of many", interval_s=0.01):
        while "1 of many" not in stream.getvalue():
            assert stream.written.acquire(timeout=60)
    text = stream.getvalue()
    assert ("\x1b" in text) == is_terminal
    if not is_terminal:
        assert text.startswith("0 of many\n1 of many\n")


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        stream = Stream(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_shown(lambda: "working"):
            pass
        assert stream.getvalue() == ""


def test_loading_weights_reports_the_loaded_share() -> None:
    shares: list[float] = []
    with loading_reported(shares.append):
        load_model(None, device="cpu")
    assert shares[0] == 0
    assert len(shares) > 20
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] < 1
    num = len(shares)
    load_model(None, device="cpu")
    assert len(shares) == num
