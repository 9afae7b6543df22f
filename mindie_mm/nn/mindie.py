"""The slots that MindIE gives a family on its wire, and a run's arrays read back from them.

MindIE's words carry neither a dtype nor what they are of: writer and reader must know. A family states it once, in
its own file, as a `Layout` per kind of medium.
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
    """An array in a segment of its own. Two slots: its name word, then its shape word."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class InWord:
    """One to five integers, in one slot, packed as if they were a shape; int64 [n] to those who write and read them."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands on the first slots of a run of one kind, in order."""

    fields: tuple[InSegment | InWord, ...]

    @property
    def num_slots(self) -> int:
        """Words of an item; it needs as many features."""
        return sum(2 if isinstance(field, InSegment) else 1 for field in self.fields)

    def words(self, segments: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> Iterator[int]:
        """The words of an item, by the names of its segments and by its arrays. LimitExceeded for what does not fit."""
        for field in self.fields:
            if isinstance(field, InSegment):
                yield encode_shm_name_to_int64(segments[field.name])
                yield encode_shape_to_int64(arrays[field.name].shape)
            else:
                yield encode_shape_to_int64(arrays[field.name])


def attach_words(words: Sequence[int], layouts: Iterable[Layout]) -> SegmentsView:
    """The arrays of an item whose run begins with `words`; their number tells which of `layouts` it has.

    CorruptReference for a damaged word, or a number that is no layout's; SegmentMissing, LimitExceeded.
    """
    lengths = {layout.num_slots: layout for layout in layouts}
    if len(words) not in lengths:
        known = " or ".join(map(str, sorted(lengths))) or "none"
        raise CorruptReference(f"a run has {len(words)} words of MindIE's wire; items of this model have {known}")
    segments: dict[str, SegmentSpec] = {}
    integers: dict[str, list[int]] = {}
    slots = iter(words)
    for field in lengths[len(words)].fields:
        if isinstance(field, InSegment):
            segments[field.name] = SegmentSpec.from_words(next(slots), next(slots), field.dtype)
        else:
            integers[field.name] = decode_shape_from_int64(next(slots))
    return SegmentsView(segments, integers)
