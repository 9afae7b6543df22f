"""Ranges of a file, one behind another in memory: how a block lies that fits nowhere in one piece.

Python's mmap cannot say where a mapping is to lie; the system call can.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any
from weakref import finalize

from mindie_mm.errors import SharedMemoryError
from mindie_mm.shm.extent import Pieces

# <linux/mman.h>, the same on x86-64 and aarch64; the mmap module does not name them all.
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value


def map_pieces(descriptor: int, pieces: Pieces, *, writable: bool) -> memoryview:
    """The pieces of an open file, in whole pages, mapped in this order; gone with the last array.

    SharedMemoryError if the kernel refuses.
    """
    libc = _libc()
    total = sum(nbytes for _, nbytes in pieces)
    address = libc.mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if address == _FAILED:
        _refuse(total, pieces)
    buffer = (ctypes.c_char * total).from_address(address)
    # Not at the interpreter's exit: arrays may live longer there.
    finalize(buffer, libc.munmap, address, total).atexit = False
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    at = address
    for offset, nbytes in pieces:
        if libc.mmap(at, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE, descriptor, offset) != at:
            _refuse(total, pieces)
        at += nbytes
    view = memoryview(buffer).cast("B")
    return view if writable else view.toreadonly()


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
