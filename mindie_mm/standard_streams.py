"""Descriptors 0 to 2 and Python's streams over them: open, in UTF-8, and standard error never waited for."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex

_log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 2**20
"""Most bytes of the log that wait for who reads standard error; further lines are dropped."""
MAX_LINE_BYTES = 2**16
"""Longest line that is kept in one piece."""
CLOSE_TIMEOUT_S = 1.0
"""How long the reader of standard error may take for what waits when the process ends."""

_PIPE_BYTES = 2**20
_NAMES = ("stdin", "stdout", "stderr")

_dropped_lines = 0


def open_missing() -> None:
    """Open those of descriptors 0 to 2 on /dev/null that are closed.

    Else the next file or socket gets such a number, and what a library prints goes into it; and libuv aborts when it
    is to close one of them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_NAMES):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def missing() -> list[str]:
    """Return which of stdin, stdout and stderr this process was started without."""
    return [name for name in _NAMES if getattr(sys, f"__{name}__") is None]


def use_utf8() -> None:
    """Have sys.stdin, sys.stdout and sys.stderr speak UTF-8, whatever the locale; what was closed reads as empty.

    What cannot be encoded, as the undecodable bytes of a file's name, is escaped on standard error and kept on
    standard output.
    """
    open_missing()
    for name in missing():
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - open for good
    for name in _NAMES:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a notebook's, or a test's, is not
            stream.reconfigure(encoding="utf-8", errors="backslashreplace" if name == "stderr" else "surrogateescape")


@contextmanager
def stderr_without_waiting() -> Iterator[None]:
    """Put a pipe that is always read in the place of descriptor 2, for this process and those that it starts."""
    drained = _DrainedStderr()
    try:
        yield
    finally:
        drained.close()


class _DrainedStderr:
    """Standard error behind a pipe: one thread reads it, another writes to whatever standard error was.

    A terminal that is stopped, or a log driver that hangs, holds up the second thread alone. Then lines wait, up to
    MAX_WAITING_BYTES; later ones are dropped and counted, and the count is logged once lines are taken again.
    Not only records go this way, but whatever a library of any process prints by itself.
    """

    def __init__(self) -> None:
        self._untold_lines = 0
        """Lines that were dropped, which the log does not tell of yet."""
        self._last_line = f"{token_hex(16)}\n".encode()
        """What this process writes last. Others may have the pipe for longer."""
        self._target = os.dup(2)
        self._source, pipe = os.pipe()
        with suppress(OSError):  # the system grants this user no larger one
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.dup2(pipe, 2, inheritable=True)
        os.close(pipe)
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._ended = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=run, name=f"stderr-{run.__name__.strip('_')}", daemon=True)
            for run in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give descriptor 2 back, once all is written. Where that takes too long it is /dev/null for the rest."""
        os.write(2, self._last_line)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2, inheritable=True)
        os.close(null)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S / len(self._threads))
        if not any(thread.is_alive() for thread in self._threads):
            os.dup2(self._target, 2, inheritable=True)
            os.close(self._target)
            os.close(self._source)

    def _read(self) -> None:
        """Move what comes from the pipe to the queue, whole lines at a time."""
        begun, ended = b"", False
        while not ended:
            data, last_line, _ = (begun + os.read(self._source, MAX_LINE_BYTES)).partition(self._last_line)
            ended = bool(last_line)
            lines, newline, begun = data.rpartition(b"\n")
            if ended or len(begun) > MAX_LINE_BYTES:
                newline, begun = newline + begun, b""
            self._queue(lines + newline, ended=ended)

    def _queue(self, lines: bytes, *, ended: bool) -> None:
        global _dropped_lines  # noqa: PLW0603 - standard error is the process's
        with self._change:
            self._ended = ended
            # Once some are dropped all are, until the rest is written: what is left out stands in one place.
            if lines and not self._untold_lines and self._num_bytes + len(lines) <= MAX_WAITING_BYTES:
                self._waiting.append(lines)
                self._num_bytes += len(lines)
            elif lines:
                number = max(1, lines.count(b"\n"))
                self._untold_lines += number
                _dropped_lines += number
            self._change.notify()

    def _write(self) -> None:
        """Write what is queued to the former standard error."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                lines = self._waiting[0]
            _write_all(self._target, lines)
            with self._change:
                self._waiting.popleft()
                self._num_bytes -= len(lines)
                untold = 0
                if not self._waiting:
                    untold, self._untold_lines = self._untold_lines, 0
            if untold:
                _log.warning(
                    "%d lines of the log were dropped: standard error was not read, and at most %d bytes wait for it",
                    untold,
                    MAX_WAITING_BYTES,
                )


def dropped_lines() -> int:
    """Return how many lines of the log this process has dropped, because standard error was not read."""
    return _dropped_lines


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, waiting for who reads it; drop the rest where it cannot be written at all."""
    left = memoryview(data)
    with suppress(OSError):  # the reader is gone, or the disk is full: nobody is left to be told
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another program that has the same file made it non-blocking
                select.select([], [descriptor], [])
