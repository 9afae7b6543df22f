"""Free space of an arena: best fit, in whole pages, neighbours joined at once."""

from __future__ import annotations

from bisect import bisect_left, insort

from mindie_mm.shm.layout import PAGE, round_up


class Heap:
    """Extents of a range of bytes. One process, no locking of its own."""

    def __init__(self, start: int, stop: int) -> None:
        self._by_size = [(stop - start, start)]  # sorted: (size, offset)
        self._starts = {start: stop - start}  # offset -> size of each free extent
        self._stops = {stop: start}  # end -> offset of each free extent
        self.free_bytes = stop - start

    @property
    def largest_bytes(self) -> int:
        """The largest extent: what the next allocation can be at most."""
        return self._by_size[-1][0] if self._by_size else 0

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(offset, bytes) of the smallest extent that holds `size`, cut to whole pages; None if none does."""
        size = round_up(size, PAGE)
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, offset = self._by_size.pop(at)
        del self._starts[offset], self._stops[offset + found]
        if found > size:
            self._insert(offset + size, found - size)
        self.free_bytes -= size
        return offset, size

    def free(self, offset: int, size: int) -> None:
        """Gives back what `allocate` returned."""
        self.free_bytes += size
        before = self._stops.get(offset)
        if before is not None:
            size += offset - before
            offset = before
            self._remove(offset)
        if offset + size in self._starts:
            size += self._remove(offset + size)
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._starts[offset] = size
        self._stops[offset + size] = offset

    def _remove(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._stops[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size
