"""Media that were preprocessed lately: what comes again, as a chat's pictures do at each turn, is copied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.nn.family import Plan

_Arrays = Mapping[str, NDArray[Any]]


class Preprocessed:
    """Arrays of media items by what names their content, `capacity_bytes` of them; the longest unused go first."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._items = OrderedDict[bytes, _Arrays]()

    def write(self, plan: Plan, digest: bytes, arrays: _Arrays) -> None:
        """Into those of `plan.specs`: as `plan.write`, which is called where nothing is kept under `digest`."""
        kept = self._items.get(digest)
        if kept is None:
            plan.write(arrays)
            self._keep(digest, {name: arrays[name] for name in plan.specs})
            return
        self._items.move_to_end(digest)
        for name, array in kept.items():
            arrays[name][...] = array

    def _keep(self, digest: bytes, arrays: _Arrays) -> None:
        nbytes = _nbytes(arrays)
        if nbytes > self._capacity_bytes:
            return
        while self._used_bytes + nbytes > self._capacity_bytes:
            _, dropped = self._items.popitem(last=False)
            self._used_bytes -= _nbytes(dropped)
        with suppress(MemoryError):  # the item itself is done, and goes on without a copy
            self._items[digest] = {name: np.array(array) for name, array in arrays.items()}
            self._used_bytes += nbytes


def _nbytes(arrays: _Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
