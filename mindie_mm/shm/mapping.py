"""Memory mappings beyond those of Python's mmap module.

`Populator` faults in the pages of a mapping in the background. Faulting in 1 GiB takes 0.6 to 2 s. Without the
populator, the first requests would wait that long.

`map_pieces` maps several ranges contiguously, for a block that is stored in several pieces. `map_file` keeps no file
descriptor open. Each mapping of the mmap module keeps a descriptor open, and a process can open only 1,024 descriptors
by default.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Event, Thread
from typing import Any
from weakref import finalize

from mindie_mm.errors import SharedMemoryError
from mindie_mm.shm.format.layout import Pieces

# From <linux/mman.h>, the same on x86-64 and aarch64. The mmap module does not define all of these constants.
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value


def map_pieces(descriptor: int, pieces: Pieces, *, writable: bool) -> memoryview:
    """Map the pieces of an open file contiguously, in the given order.

    The memory stays mapped as long as an array uses it.

    Args:
        descriptor: The open file.
        pieces: Ranges of the file. Each range consists of whole pages.
        writable: Whether the mapping is writable.

    Raises:
        SharedMemoryError: The kernel refuses the mapping.

    """
    libc = _libc()
    total = sum(nbytes for _, nbytes in pieces)
    address = libc.mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if address == _FAILED:
        _refuse(total, pieces)
    buffer = _buffer(address, total)
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    at = address
    for offset, nbytes in pieces:
        if libc.mmap(at, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE, descriptor, offset) != at:
            _refuse(total, pieces)
        at += nbytes
    return buffer if writable else buffer.toreadonly()


def map_file(descriptor: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` of an open file for reading. The memory stays mapped as long as an array uses it.

    Raises:
        OSError: The kernel refuses the mapping.

    """
    address = _libc().mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return _buffer(address, nbytes).toreadonly()


def _buffer(address: int, nbytes: int) -> memoryview:
    """Return a buffer over the mapping at `address`. The mapping is removed when the last reference is dropped."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # Do not unmap at interpreter exit, because arrays may outlive the finalizers.
    finalize(buffer, _libc().munmap, address, nbytes).atexit = False
    return memoryview(buffer).cast("B")


def _refuse(total: int, pieces: Pieces) -> None:
    why = os.strerror(ctypes.get_errno())
    raise SharedMemoryError(f"{total} bytes in {len(pieces)} pieces cannot be mapped: {why}")


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


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
