"""Layouts of media in MindIE's wire format, and a reader of their arrays.

MindIE's handle words contain neither the dtypes nor the names of arrays, so writer and reader must agree on both. A
family file defines them in one `Layout` per kind of media, or in one `PromptLayout`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import CorruptReference
from mindie_mm.inputs import Kind
from mindie_mm.shm.mindie import (
    SegmentSpec,
    SegmentsView,
    decode_shape_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
    is_segment_word,
)

PLANES = "planes"
"""Name of an array of uint8 pixels whose channels are separate."""
NORMALIZED = "normalized"
"""Name of an array of pixels that the tokenizer has normalized."""


def mindie_pad(config: Mapping[str, Any]) -> int:
    """Return `Processor.mindie_pad` for a checkpoint with this config.json."""
    pad = (config.get("text_config") or {}).get("pad_token_id")
    return -1 if pad is None else int(pad)


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
    enclosed: bool = False
    """True if the words follow the item's first placeholder, and padding ids replace all other placeholders except the
    last."""
    per_run: bool = False
    """True if each run of placeholders has its own words, which refer to one row of the item's arrays. A reader sees
    each run as one item."""

    @property
    def num_slots(self) -> int:
        """Number of handle words of an item."""
        return sum(2 if isinstance(field, InSegment) else 1 for field in self.fields)

    @property
    def least_features(self) -> int:
        """Minimum number of features of an item, or of a run if each run has its own words."""
        return self.num_slots + 2 * self.enclosed

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


@dataclass(frozen=True, slots=True)
class Joined:
    """The arrays of all items of one kind in one segment, joined along their first axis."""

    kind: Kind
    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class OfPrompt:
    """An array in a segment, int64 [1, T], that describes the prompt as if each item had only one placeholder."""

    name: Literal["input_ids", "attention_mask"]
    """input_ids for an array of the ids, or attention_mask for an array of ones."""


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The segments of a whole prompt. Two handle words per field encode the segment's name and the array's shape.

    The words are consecutive. A field without an array has two zeros instead.
    """

    fields: tuple[Joined | OfPrompt, ...]
    replaces_ids: bool = False
    """True if padding ids replace all ids of the prompt, and the words are at its start. If not, the words follow the
    first placeholder of the prompt."""
    unframed: frozenset[Kind] = frozenset()
    """Kinds of media whose items are not surrounded by the ids `Placeholder.before` and `Placeholder.after`."""

    @property
    def kinds(self) -> set[Kind]:
        """Kinds of media that a prompt may contain."""
        return {field.kind for field in self.fields if isinstance(field, Joined)}

    @property
    def num_slots(self) -> int:
        """Number of handle words and zeros."""
        return 2 * len(self.fields)

    def attach(self, ids: NDArray[np.int64], tokens: Iterable[int]) -> tuple[SegmentsView, int] | None:
        """Attach the segments of a prompt.

        Args:
            ids: Ids with handle words, int64 [T].
            tokens: Placeholders of the model.

        Returns:
            The arrays, and the index of the first handle word or zero. None if the ids contain no handle words, or if
            their first handle word is not the name word of a segment.

        Raises:
            CorruptReference: A handle word is damaged, missing or in the wrong place.
            SegmentMissing: A segment does not exist.
            LimitExceeded: A segment is larger than a limit allows.

        """
        negative = np.flatnonzero(ids < 0)
        if not len(negative) or not is_segment_word(int(ids[negative[0]])):
            return None
        start = self._start(ids, int(negative[0]), () if self.replaces_ids else {*tokens})
        stop = start + self.num_slots
        words = ids[start:stop].tolist()
        if len(words) < self.num_slots or (ids[stop:] < (-1 if self.replaces_ids else 0)).any():
            raise CorruptReference(
                f"in MindIE's format, a prompt of this model has exactly {self.num_slots} handle words in a row; the "
                f"handle words that begin at token {start} are too few, or the ids contain other handle words"
            )
        specs: dict[str, SegmentSpec] = {}
        for field, name, shape in zip(self.fields, words[::2], words[1::2], strict=True):
            if name or shape:
                dtype = field.dtype if isinstance(field, Joined) else "int64"
                specs[field.name] = SegmentSpec.from_words(name, shape, dtype)
        return SegmentsView(specs, {}), start

    def _start(self, ids: NDArray[np.int64], first: int, tokens: Collection[int]) -> int:
        """Return the index of the first handle word or zero. `first` is the index of the first handle word."""
        for start in range(first, max(first - self.num_slots, -1), -2):
            behind = int(ids[start - 1]) in tokens if start else self.replaces_ids
            if behind and not ids[start:first].any():
                return start
        where = "at the start of the prompt" if self.replaces_ids else "after the first placeholder"
        raise CorruptReference(f"the handle words at token {first} are not {where}")


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
