"""Standard streams that are always open and use UTF-8. Writing to standard error never blocks."""

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
"""Maximum total size in bytes of the log lines that wait until standard error is read. Further lines are dropped."""
MAX_LINE_BYTES = 2**16
"""Maximum size in bytes of a line that is written in one piece."""
CLOSE_TIMEOUT_S = 1.0
"""Maximum time in seconds to write the waiting lines when the process exits."""

_PIPE_BYTES = 2**20
NAMES = ("stdin", "stdout", "stderr")
"""Names of the streams in `sys`, by descriptor."""

_dropped_lines = 0


def open_missing() -> None:
    """Open descriptors 0 to 2 on /dev/null if they are closed.

    Otherwise the next file or socket may get one of these descriptors, and libraries may print to it. libuv also aborts
    the process if it has to close one of these descriptors.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(NAMES):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def missing() -> list[str]:
    """Return the names of the standard streams that were closed when this process started."""
    return [name for name in NAMES if getattr(sys, f"__{name}__") is None]


def use_utf8() -> None:
    """Set sys.stdin, sys.stdout and sys.stderr to UTF-8 in any locale. Open closed streams on /dev/null.

    If a file name contains bytes that are not UTF-8, standard error shows them as escape sequences, and standard output
    contains the original bytes.
    """
    open_missing()
    for name in missing():
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - stays open
    for name in NAMES:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # not in notebooks and tests
            stream.reconfigure(encoding="utf-8", errors="backslashreplace" if name == "stderr" else "surrogateescape")


@contextmanager
def stderr_without_waiting() -> Iterator[None]:
    """Replace descriptor 2 of this process and its later children with a pipe that a thread reads continuously."""
    drained = _DrainedStderr()
    try:
        yield
    finally:
        drained.close()


class _DrainedStderr:
    """A pipe in place of standard error. One thread reads the pipe, and another writes to the original standard error.

    If the terminal is stopped or the log driver hangs, only the second thread blocks. Up to MAX_WAITING_BYTES of
    lines then wait in memory. Further lines are dropped and counted, and their number is logged when lines can be
    written again. Output that libraries print directly to descriptor 2, in this process or in its children, also
    goes through the pipe.
    """

    def __init__(self) -> None:
        self._untold_lines = 0
        """Number of dropped lines that have not been logged yet."""
        self._last_line = f"{token_hex(16)}\n".encode()
        """Marker for the end of the output. An end of file cannot mark it: other processes may keep the pipe open."""
        self._target = os.dup(2)
        self._source, pipe = os.pipe()
        with suppress(OSError):  # the user has reached the limit on the memory of pipes
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
        """Write all lines and restore descriptor 2. If writing takes too long, leave descriptor 2 on /dev/null."""
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
        """Move whole lines from the pipe to the queue."""
        begun, ended = b"", False
        while not ended:
            data, last_line, _ = (begun + os.read(self._source, MAX_LINE_BYTES)).partition(self._last_line)
            ended = bool(last_line)
            lines, newline, begun = data.rpartition(b"\n")
            if ended or len(begun) > MAX_LINE_BYTES:
                newline, begun = newline + begun, b""
            self._queue(lines + newline, ended=ended)

    def _queue(self, lines: bytes, *, ended: bool) -> None:
        global _dropped_lines  # noqa: PLW0603 - a process has only one standard error
        with self._change:
            self._ended = ended
            # After dropping a line, drop all further lines until the queue is empty, so that the log has a single gap.
            if lines and not self._untold_lines and self._num_bytes + len(lines) <= MAX_WAITING_BYTES:
                self._waiting.append(lines)
                self._num_bytes += len(lines)
            elif lines:
                number = max(1, lines.count(b"\n"))
                self._untold_lines += number
                _dropped_lines += number
            self._change.notify()

    def _write(self) -> None:
        """Write the queued lines to the original standard error."""
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
                    "%d lines of the log were dropped, because standard error was not read and only %d bytes "
                    "can be buffered",
                    untold,
                    MAX_WAITING_BYTES,
                )


def dropped_lines() -> int:
    """Return the number of log lines that this process has dropped because standard error was not read."""
    return _dropped_lines


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes of `data`, and wait for the reader if necessary. If writing fails, drop the remaining bytes."""
    left = memoryview(data)
    with suppress(OSError):  # the reader is gone or the disk is full, and the error cannot be reported anywhere else
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another program has made the shared file non-blocking
                select.select([], [descriptor], [])


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, whose end sends SIGHUP to the process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
