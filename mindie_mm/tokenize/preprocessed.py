"""A cache of preprocessed media, for media that are sent again, for example in every turn of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

_Arrays = Mapping[str, NDArray[Any]]


class Preprocessed:
    """Arrays of media items, by the digest of the item's content. The least recently used arrays are evicted.

    Several threads may use a cache at the same time. The lock is not held while arrays are copied, because an event
    loop may wait for the lock.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._items = LRUCache[bytes, _Arrays](capacity_bytes, getsizeof=_nbytes)
        self._lock = Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._items

    def fits(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` bytes fit in the cache."""
        return nbytes <= self._items.maxsize

    def copy(self, digest: bytes, arrays: _Arrays) -> bool:
        """Copy the arrays cached under `digest` into `arrays`, by name. Return False if there are none."""
        with self._lock:
            kept = self._items.get(digest)
        if kept is None:
            return False
        for name, array in kept.items():
            arrays[name][...] = array
        return True

    def keep(self, digest: bytes, arrays: _Arrays) -> None:
        """Cache a copy of `arrays` under `digest`, unless they are larger than the cache."""
        if not self.fits(_nbytes(arrays)) or digest in self._items:
            return
        try:
            copied = {name: np.array(array) for name, array in arrays.items()}
        except MemoryError:  # the item is complete without a cached copy
            return
        with self._lock:
            self._items[digest] = copied


def _nbytes(arrays: _Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
