"""The memory that a decoder writes to. The tokenizer copies each item from it into the item's block.

A decoder never gets a descriptor of the arena, so one that was taken over by an item reaches no other item's block. The
copy takes less time than to map a block and to fault in its pages for each item (`python -m bench.decoders`).
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
"""Offset, dtype and shape of each array."""

_KEPT_BYTES = 2**24
"""Number of bytes that stay allocated between two items."""

_MADV_REMOVE = 9  # <linux/mman.h>


class Scratch:
    """Memory that the tokenizer shares with one decoder. It is freed with the last mapping."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory of an open file, which `make_file` has made. The caller closes the descriptor."""
        self._mapping = mmap.mmap(descriptor, 0)

    def arrays(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Return the arrays of `layout`."""
        return {
            name: np.ndarray(shape, dtype, self._mapping, offset) for name, (offset, dtype, shape) in layout.items()
        }

    def copy_to(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy what the decoder has written into `arrays`, which have the layout of `layout_of`."""
        layout = layout_of(arrays)
        for name, array in self.arrays(layout).items():
            arrays[name][...] = array
        self._give_back(sum(array.nbytes for array in arrays.values()))

    def close(self) -> None:
        """Release the mapping now, unless a thread still copies from it. Then it goes with its last array."""
        with suppress(BufferError):
            self._mapping.close()

    def _give_back(self, used_bytes: int) -> None:
        """Free the memory that a large item has taken."""
        if used_bytes > _KEPT_BYTES:
            self._mapping.madvise(_MADV_REMOVE, _KEPT_BYTES, len(self._mapping) - _KEPT_BYTES)


def make_file(nbytes: int) -> int:
    """Return a descriptor of a new file for `nbytes` of scratch memory. Pages are allocated when they are written."""
    descriptor = os.memfd_create("scratch", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, round_up(nbytes, PAGE))
    return descriptor


def layout_of(arrays: Mapping[str, NDArray[Any]]) -> Layout:
    """Return the layout of arrays like these in a scratch memory, one behind another."""
    layout: Layout = {}
    offset = 0
    for name, array in arrays.items():
        layout[name] = offset, str(array.dtype), array.shape
        offset = round_up(offset + array.nbytes, ALIGNMENT)
    return layout
