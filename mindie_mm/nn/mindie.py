"""Layouts of media items in MindIE's wire format, and a reader of their arrays.

MindIE's handle words contain neither the dtypes nor the names of arrays, so writer and reader must agree on both. A
family file defines them in one `Layout` per kind of media.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mindie_mm.errors import CorruptReference
from mindie_mm.shm.mindie import (
    SegmentSpec,
    SegmentsView,
    decode_shape_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
)


@dataclass(frozen=True, slots=True)
class InSegment:
    """An array in its own shared-memory segment. Two handle words encode the segment's name and the array's shape."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class InWord:
    """An array of one to five integers, int64 [n]. One handle word encodes them as if they were a shape."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields that the handle words of an item encode, in order. Each kind of media has its own layout."""

    fields: tuple[InSegment | InWord, ...]

    @property
    def num_slots(self) -> int:
        """Number of handle words of an item. An item must have at least as many features."""
        return sum(2 if isinstance(field, InSegment) else 1 for field in self.fields)

    def words(self, segments: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> Iterator[int]:
        """Yield the handle words of an item.

        Args:
            segments: Name of the segment of each `InSegment` field.
            arrays: Array of each field.

        Raises:
            LimitExceeded: A shape or the integers of an `InWord` field do not fit into one handle word.

        """
        for field in self.fields:
            if isinstance(field, InSegment):
                yield encode_shm_name_to_int64(segments[field.name])
                yield encode_shape_to_int64(arrays[field.name].shape)
            else:
                yield encode_shape_to_int64(arrays[field.name])


def attach_words(words: Sequence[int], layouts: Iterable[Layout]) -> SegmentsView:
    """Attach the arrays of an item. The number of handle words determines the layout.

    Args:
        words: All handle words of the item.
        layouts: Layouts of the model's family, each with a different number of handle words.

    Raises:
        CorruptReference: A handle word is damaged, or no layout has this number of handle words.
        SegmentMissing: A segment does not exist.
        LimitExceeded: A segment is larger than a limit allows.

    """
    lengths = {layout.num_slots: layout for layout in layouts}
    if len(words) not in lengths:
        known = " or ".join(map(str, sorted(lengths))) or "none"
        raise CorruptReference(
            f"an item in MindIE's format has {len(words)} handle words; items of this model have {known}"
        )
    segments: dict[str, SegmentSpec] = {}
    integers: dict[str, list[int]] = {}
    slots = iter(words)
    for field in lengths[len(words)].fields:
        if isinstance(field, InSegment):
            segments[field.name] = SegmentSpec.from_words(next(slots), next(slots), field.dtype)
        else:
            integers[field.name] = decode_shape_from_int64(next(slots))
    return SegmentsView(segments, integers)
