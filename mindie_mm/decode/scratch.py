"""Scratch memory for the arrays that a decoder writes. The tokenizer process copies them to the item's block.

A decoder never gets a descriptor of the arena, so a compromised decoder cannot access the blocks of other items.
Copying is faster than mapping a block and faulting in its pages for each item (`python -m bench.decoders`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.shm.format.layout import ALIGNMENT, PAGE, round_up

Layout = dict[str, tuple[int, str, tuple[int, ...]]]
"""Offset in bytes, dtype and shape of each array, by name."""

_KEPT_BYTES = 2**24
"""Number of bytes that stay allocated between items."""

_MADV_REMOVE = 9  # <linux/mman.h>


class Scratch:
    """Memory that the tokenizer process shares with one decoder. The kernel frees it when no process maps it."""

    def __init__(self, descriptor: int) -> None:
        """Map a file from `make_file`. The caller closes the descriptor."""
        self._mapping = mmap.mmap(descriptor, 0)

    def arrays(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Return arrays over the memory, placed according to `layout`."""
        return {
            name: np.ndarray(shape, dtype, self._mapping, offset) for name, (offset, dtype, shape) in layout.items()
        }

    def move(self, written: Mapping[str, NDArray[Any]], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the decoder's output to `arrays`, and clear the memory. `written` is the output, from `Scratch.arrays`.

        Writing zeros takes 2% of the time that a fresh file takes, because the pages stay allocated.
        """
        for name, array in written.items():
            arrays[name][...] = array
            array.fill(0)
        if sum(array.nbytes for array in arrays.values()) > _KEPT_BYTES:
            self._mapping.madvise(_MADV_REMOVE, _KEPT_BYTES, len(self._mapping) - _KEPT_BYTES)

    def close(self) -> None:
        """Unmap the memory. It stays mapped while arrays of `Scratch.arrays` exist."""
        with suppress(BufferError):
            self._mapping.close()


def make_file(nbytes: int) -> int:
    """Create a file for `nbytes` bytes of scratch memory, and return its descriptor. Writing allocates the pages."""
    descriptor = os.memfd_create("scratch", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, round_up(nbytes, PAGE))
    return descriptor


def layout_of(arrays: Mapping[str, NDArray[Any]]) -> Layout:
    """Return a contiguous, aligned layout for arrays with the dtypes and shapes of `arrays`."""
    layout: Layout = {}
    offset = 0
    for name, array in arrays.items():
        layout[name] = offset, str(array.dtype), array.shape
        offset = round_up(offset + array.nbytes, ALIGNMENT)
    return layout
