"""A background thread that populates a mapping, that is, faults in its pages.

Faulting in 1 GiB takes 0.6 to 2 s. Without this thread, the first requests would wait that long.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

# From <linux/mman.h>, since Linux 5.14. The mmap module does not define these constants.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

# Python holds the GIL during madvise. Small steps limit how long other threads wait for the GIL.
STEP_BYTES = 1 << 20


class Populator:
    """Background thread that populates a mapping from its start, step by step, until it is complete or stopped."""

    def __init__(self, advice: int, report: Callable[[int], None] | None = None) -> None:
        """Prepare the thread.

        Args:
            advice: MADV_POPULATE_READ or MADV_POPULATE_WRITE.
            report: Called with the number of bytes populated so far.

        """
        self.done = Event()
        """Event that is set when every page is populated, or when population was stopped or is impossible."""
        self._advice = advice
        self._report = report or _ignore
        self._stopped = False
        self._thread: Thread | None = None

    def start(self, mapping: mmap.mmap) -> None:
        """Start to populate `mapping` in the background. Call this method only once."""
        thread = Thread(target=self._run, args=(mapping,), name="mindie_mm-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the container allows no more threads: pages are faulted in on first use
            self._report(len(mapping))
            self.done.set()
        else:
            self._thread = thread

    def stop(self) -> None:
        """Tell the thread to stop after the current step. After that, the thread no longer calls `report`."""
        self._stopped = True
        self._report = _ignore

    def join(self) -> None:
        """Wait until the thread has ended. After `stop`, this takes at most one step, about 2 ms."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, mapping: mmap.mmap) -> None:
        total = len(mapping)
        with suppress(OSError):  # the kernel may not support huge pages for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, total, STEP_BYTES):
            if self._stopped:
                break
            try:
                mapping.madvise(self._advice, start, min(STEP_BYTES, total - start))
            except OSError:
                # EINVAL: the kernel is older than 5.14. EFAULT: the file was truncated. Pages are faulted in on use.
                break
            self._report(min(start + STEP_BYTES, total))
        self._report(total)
        self.done.set()


def _ignore(num_bytes: int) -> None:
    """Discard the report."""
