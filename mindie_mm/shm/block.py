"""A block that is being filled by the arena's owner."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from mindie_mm.shm.block_header import BlockPlan
from mindie_mm.shm.ref import Ref

if TYPE_CHECKING:
    import numpy as np


class Store(Protocol):
    """What holds blocks."""

    def publish(self, ref: Ref, plan: BlockPlan, offset: int, digest: bytes | None) -> None: ...

    def discard(self, ref: Ref) -> None: ...


class Block(Mapping[str, "np.ndarray[Any, Any]"]):
    """Named arrays to write into, then `publish`. Leaving it without `publish` frees it.

    Once it is published nobody writes to it; once it is left its arrays are not used any more.
    """

    __slots__ = ("_arrays", "_offset", "_plan", "_published", "_store", "ref")

    def __init__(self, store: Store, ref: Ref, plan: BlockPlan, mapping: mmap.mmap, offset: int) -> None:
        import numpy as np  # late: the operator's tools do without

        self.ref = ref
        """The reference to hand on once the block is published."""
        self._store, self._plan, self._offset = store, plan, offset
        self._published = False
        self._arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.ndarray(array.spec.shape, array.spec.dtype, mapping, offset + array.offset)
            for name, array in plan.arrays.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the block: header, arrays and alignment."""
        return self._plan.size

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def publish(self, digest: bytes | None = None) -> Ref:
        """Makes the block readable by its reference; never reads the data. Once: a second call changes nothing.

        `digest`: 16 to 64 bytes over all arrays and the preprocessing settings; without one the item is never cached.
        StaleReference if the block was freed meanwhile: its request is over.
        """
        if not self._published:
            self._store.publish(self.ref, self._plan, self._offset, digest)
            self._published = True
        return self.ref

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._published:
            self._store.discard(self.ref)
