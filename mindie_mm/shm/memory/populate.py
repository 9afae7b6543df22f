"""Faults the pages of a mapping in, in the background: 0.6 to 2 s per GiB that no request then waits for."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

# <linux/mman.h>, Linux 5.14; the mmap module does not name them.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

# madvise holds the interpreter's lock: a step is what other threads may have to wait for.
STEP_BYTES = 1 << 20


class Populator:
    """Populates a mapping from its start, step by step, until it is done or told to stop."""

    def __init__(self, advice: int, report: Callable[[int], None] | None = None) -> None:
        """`report` is told the bytes populated so far."""
        self.done = Event()
        """Set when every page is there, it cannot be done ahead of use, or it was stopped."""
        self._advice = advice
        self._report = report or _ignore
        self._stopped = False
        self._thread: Thread | None = None

    def start(self, mapping: mmap.mmap) -> None:
        """Once."""
        thread = Thread(target=self._run, args=(mapping,), name="mindie_mm-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a container's limit of threads is reached: pages come as they are used
            self._report(len(mapping))
            self.done.set()
        else:
            self._thread = thread

    def stop(self) -> None:
        """Soon; nothing more is reported."""
        self._stopped = True
        self._report = _ignore

    def join(self) -> None:
        """Waits until it has let go of the mapping: after `stop` for a step, 2 ms."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, mapping: mmap.mmap) -> None:
        total = len(mapping)
        with suppress(OSError):  # a kernel without huge pages for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, total, STEP_BYTES):
            if self._stopped:
                break
            try:
                mapping.madvise(self._advice, start, min(STEP_BYTES, total - start))
            except OSError:
                # An older kernel does not know the advice (EINVAL), or the file was cut (EFAULT): pages come as used.
                break
            self._report(min(start + STEP_BYTES, total))
        self._report(total)
        self.done.set()


def _ignore(num_bytes: int) -> None:
    """Nobody wants to know."""
