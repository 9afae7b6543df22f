"""Free space of an arena.

Freed extents are kept in one list per size class and reused last in, first out. If no free extent is large enough,
adjacent extents are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from functools import lru_cache

from mindie_mm.shm.format.layout import PAGE, Extent, Pieces, round_up

# Number of size classes between two powers of two. A block of more than eight pages wastes at most an eighth of its
# size.
CLASSES_PER_DOUBLING = 8
_STEP_BITS = (2 * CLASSES_PER_DOUBLING).bit_length() - 1


@lru_cache(maxsize=4096)
def size_class(size: int) -> int:
    """Return `size` rounded up to its size class, in bytes.

    There are few size classes, so a freed extent is likely to have exactly the size of a later block.
    """
    step = max(PAGE, 1 << max((size - 1).bit_length() - _STEP_BITS, 0))
    return -(-size // step) * step


class Heap:
    """Allocator of extents in a range of bytes. It is not thread-safe."""

    def __init__(self, start: int, stop: int) -> None:
        self._extents = _Extents()
        self._extents.free(start, stop - start)
        self.free_bytes = stop - start
        # Freed extents by size class. The extent freed last is reused first, because the CPU caches are most likely to
        # contain its pages.
        self._freed: defaultdict[int, list[Extent]] = defaultdict(list)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest free extent in bytes. No larger block can be allocated in one piece."""
        self._join()
        return self._extents.largest_bytes

    def allocate(self, size: int) -> Extent | None:
        """Allocate an extent of `size` bytes, rounded up to a size class, or only to whole pages if space is short.

        Returns:
            The extent, or None if no free extent is large enough.

        """
        taken = size_class(size)
        if freed := self._freed[taken]:
            extent: Extent | None = freed.pop()
        else:
            extent = self._extents.allocate(taken)
        if extent is None:
            self._join()
            extent = self._extents.allocate(taken)
        if extent is None and (exact := round_up(size, PAGE)) < taken:
            extent = self._extents.allocate(exact)
        if extent is not None:
            self.free_bytes -= extent.nbytes
        return extent

    def scatter(self, size: int, least_first: int, max_pieces: int) -> Pieces | None:
        """Allocate the smallest number of extents that together hold `size` bytes, in whole pages, largest first.

        Args:
            size: Total size in bytes.
            least_first: Minimum size of the first extent in bytes.
            max_pieces: Maximum number of extents.

        Returns:
            The extents, or None if the free space does not suffice within these limits.

        """
        if self.largest_bytes < least_first:
            return None
        left, pieces = round_up(size, PAGE), list[Extent]()
        for nbytes, offset in reversed(self._extents.by_size[-max_pieces:] if max_pieces else []):
            pieces.append(Extent(offset, min(nbytes, left)))
            left -= pieces[-1].nbytes
            if not left:
                break
        if left:
            return None
        for offset, nbytes in pieces:
            self._extents.allocate_at(offset, nbytes)
            self.free_bytes -= nbytes
        return tuple(pieces)

    def free(self, extent: Extent) -> None:
        """Free an extent that `allocate` returned, or one of the extents that `scatter` returned."""
        self.free_bytes += extent.nbytes
        self._freed[extent.nbytes].append(extent)

    def _join(self) -> None:
        for freed in self._freed.values():
            for extent in freed:
                self._extents.free(*extent)
        self._freed.clear()


class _Extents:
    """Set of disjoint free extents, for best-fit allocation. Adjacent extents are merged."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []  # sorted: (size, offset)
        self._starts: dict[int, int] = {}  # offset -> size
        self._stops: dict[int, int] = {}  # stop -> offset

    @property
    def largest_bytes(self) -> int:
        return self.by_size[-1][0] if self.by_size else 0

    def allocate(self, size: int) -> Extent | None:
        at = bisect_left(self.by_size, (size, 0))
        if at == len(self.by_size):
            return None
        offset = self.by_size[at][1]
        self.allocate_at(offset, size)
        return Extent(offset, size)

    def allocate_at(self, offset: int, size: int) -> None:
        """Take the first `size` bytes of the extent at `offset`."""
        old_size = self._remove(offset)
        if old_size > size:
            self._insert(offset + size, old_size - size)

    def free(self, offset: int, size: int) -> None:
        before = self._stops.get(offset)
        if before is not None:
            size += offset - before
            offset = before
            self._remove(offset)
        if offset + size in self._starts:
            size += self._remove(offset + size)
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self.by_size, (size, offset))
        self._starts[offset] = size
        self._stops[offset + size] = offset

    def _remove(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._stops[offset + size]
        del self.by_size[bisect_left(self.by_size, (size, offset))]
        return size
