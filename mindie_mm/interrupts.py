"""End of a command on SIGINT while it imports: at once, with the status that a shell gives an interrupt.

During an import a KeyboardInterrupt may turn into another error of a library, or be lost in a callback. The process
holds nothing yet that it would have to free. This module imports nothing slow.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def end_at_once(*_: object) -> None:
    """Handle SIGINT by ending the process, without a trace."""
    os.write(2, b"Interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """End at once on SIGINT inside the block, which holds nothing. Leave an ignored SIGINT and other handlers alone."""
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
    """Let SIGINT raise KeyboardInterrupt again, where it ends the process at once."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
