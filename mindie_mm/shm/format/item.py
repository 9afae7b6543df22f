"""The array that describes the media item in a block (docs/wire-format.md, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindie_mm.errors import CorruptReference
from mindie_mm.inputs import ALL_KINDS, Kind
from mindie_mm.shm.format.spec import ArraySpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

ITEM = "item"
"""Name of the array that describes the item in a block. Every block in the native wire format has this array."""


@dataclass(frozen=True, slots=True)
class MediaShape:
    """The kind, placeholder and geometry of a media item."""

    kind: Kind
    token: int
    """Placeholder id that the handle words replace."""
    num_features: int
    """Number of features that the tower returns."""
    grid: tuple[int, ...] = ()
    """Geometry that only the family interprets, such as patches (t, h, w)."""
    second_token: int | None = None
    """A second placeholder id of the item, such as that of a film's audio. Only the family knows it: it is not stored.
    Handle words never replace it."""

    @property
    def values(self) -> tuple[int, ...]:
        """Values of the block's `item` array."""
        return ALL_KINDS.index(self.kind), self.token, self.num_features, *self.grid

    @property
    def spec(self) -> ArraySpec:
        """Spec of the block's `item` array, int64 [3 + len(grid)]."""
        return ArraySpec((3 + len(self.grid),), "int64")

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> MediaShape:
        """Read the `item` array of a block.

        Raises:
            CorruptReference: The array is missing, or its values are out of range.

        """
        if ITEM not in arrays:
            raise CorruptReference(
                f"the block contains the arrays {', '.join(arrays)}, but no array {ITEM!r}, which describes them"
            )
        kind, token, num_features, *grid = arrays[ITEM].tolist()
        if not 0 <= kind < len(ALL_KINDS) or token < 0 or num_features < 1:
            raise CorruptReference(
                f"the array {ITEM!r} of the block is invalid: kind {kind}, token {token}, {num_features} features"
            )
        return cls(ALL_KINDS[kind], token, num_features, tuple(grid))
