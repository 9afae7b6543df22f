"""Exit immediately with status 130, as shells report SIGINT, if a command is interrupted while it imports its modules.

During an import, a library may turn a KeyboardInterrupt into another error, or a callback may swallow it. The process
has not acquired any resources yet, so it can exit immediately. This module itself imports only modules that load fast.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def end_at_once(*_: object) -> None:
    """Handle SIGINT: exit the process without a traceback."""
    os.write(2, b"Interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """Exit the process immediately if SIGINT arrives inside the `with` block. The block must not acquire resources.

    Do nothing if SIGINT is ignored, or has a handler other than Python's default.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruptible() -> None:
    """Let SIGINT raise KeyboardInterrupt again, if `end_at_once` is its handler at the moment."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
