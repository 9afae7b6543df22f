"""Immediate exit on SIGINT while a command imports its modules, with the shell's status for an interrupt.

During an import, a library may turn a KeyboardInterrupt into another error, or a callback may lose it. The process
holds no resources yet. This module imports nothing slow.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def end_at_once(*_: object) -> None:
    """Handle SIGINT by ending the process, without a traceback."""
    os.write(2, b"Interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """End the process at once on SIGINT inside the block, which may hold no resources.

    An ignored SIGINT and other handlers stay as they are.
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
    """Let SIGINT raise KeyboardInterrupt again, if `end_at_once` handles it."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
