"""Finding media in flat ids by their words, and overwriting hidden states with a tower's features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import CorruptReference, FeatureCountMismatch
from mindie_mm.inputs import KINDS, Kind
from mindie_mm.nn.mindie import Layout, attach_words
from mindie_mm.shm import LooseView, Ref, View, attach, is_name_word
from mindie_mm.shm.mindie import SegmentsRef, SegmentsView, is_segment_word

ItemRef = Ref | SegmentsRef
ItemView = View | LooseView | SegmentsView
"""An item's arrays, read-only and in place, whichever wire its words are of."""


ITEM = "item"
"""The array that every block of the native wire has beside the family's own: `describe` of it."""


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What a block's arrays are to the model."""

    kind: Kind
    token: int
    """The placeholder id under the words."""
    num_features: int
    """Features that the tower will give."""
    grid: tuple[int, ...] = ()
    """The family's own geometry, such as patches (t, h, w)."""

    def to_array(self) -> NDArray[np.int64]:
        """int64 [3 + len(grid)]: the block's `item`."""
        return np.array([KINDS.index(self.kind), self.token, self.num_features, *self.grid], np.int64)

    @classmethod
    def of(cls, view: Mapping[str, NDArray[Any]]) -> MediaShape:
        """From a block's `item`; CorruptReference where it has none, or one that cannot be."""
        if ITEM not in view:
            raise CorruptReference(f"the block holds {', '.join(view)}, and no {ITEM} that says what they are")
        kind, token, num_features, *grid = view[ITEM].tolist()
        if not 0 <= kind < len(KINDS) or token < 0 or num_features < 1:
            raise CorruptReference(f"the block's {ITEM} is of kind {kind}, token {token}, {num_features} features")
        return cls(KINDS[kind], token, num_features, tuple(grid))


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One media item in one sequence's ids."""

    slots: NDArray[np.int64]
    """int64 [num_features], ascending: the slots that take its features. Ids between them keep their embeddings."""
    view: ItemView
    """Its arrays; once attached, they outlive the file that they lie in."""
    shape: MediaShape
    placeholders: NDArray[np.int64] | None = None
    """int64 [num_features]: the slots of its words and placeholders, where they are not `slots`."""

    @property
    def start(self) -> int:
        """Its first slot."""
        return int(self.slots[0])

    @property
    def stop(self) -> int:
        """The slot behind its last one."""
        return int(self.slots[-1]) + 1

    def features_in(self, start: int, stop: int) -> tuple[int, int]:
        """Which of its features, [first, last), have slots in [start, stop)."""
        first, last = np.searchsorted(self.slots, (start, stop)).tolist()
        return first, last

    @property
    def ref(self) -> ItemRef:
        """What the words refer to: two items of one ref have the same features, as long as either is held."""
        return self.view.ref

    @property
    def digest(self) -> bytes | None:
        """Names the content: two items with one digest have the same features. None: never cached."""
        return self.view.digest

    def loose(self) -> MediaItem:
        """Return the item with arrays that keep no arena mapped. The arrays of MindIE's segments stay mapped."""
        return replace(self, view=self.view.loose()) if isinstance(self.view, View) else self

    @property
    def key(self) -> bytes | ItemRef:
        """Two items of one key have the same features: its digest, or what the words refer to where it has none."""
        return self.ref if self.digest is None else self.digest


def split_features(features: Tensor, items: Sequence[MediaItem]) -> list[Tensor]:
    """[..., width], the rows of all items one behind another -> each item's [num_features, width]."""
    return list(features.flatten(0, -2).split([item.shape.num_features for item in items]))


@dataclass(frozen=True, slots=True)
class Splice:
    """Features that replace rows of a flat batch's hidden states, or are added to them."""

    rows: NDArray[np.int64]
    """int64 [n], ascending."""
    features: Tensor
    """[n, hidden], and further columns where the family has them."""


def read_media(
    ids: NDArray[np.int64], describe: Callable[[ItemView], MediaShape], layouts: Iterable[Layout] = ()
) -> list[MediaItem]:
    """The media items of one sequence's ids int64 [T], in order; on MindIE's wire they have one of `layouts`.

    An item's words stand on its first slots; its further slots hold its placeholder's id.
    CorruptReference for a negative id that is no word, or a word on a slot that is not its item's; StaleReference and
    SegmentMissing as `attach`; FeatureCountMismatch, with both numbers, where slots and features differ in number.
    """
    items: list[MediaItem] = []
    words = np.flatnonzero(ids < 0)
    while len(words):
        view, num_words = _attach(ids, words, layouts)
        shape = describe(view)
        view.verify()
        start, rest = int(words[0]), words[num_words:]
        end = int(rest[0]) if len(rest) else len(ids)
        own = ids[start:end]
        slots = start + np.flatnonzero((own < 0) | (own == shape.token))
        if len(slots) != shape.num_features:
            raise FeatureCountMismatch(
                f"the {shape.kind} at slot {start} has {len(slots)} slots, its features are {shape.num_features}"
            )
        if not np.array_equal(words[:num_words], slots[:num_words]):
            raise CorruptReference(f"the words of the {shape.kind} at slot {start} do not stand on its first slots")
        items.append(MediaItem(slots, view, shape))
        words = rest
    return items


def _attach(ids: NDArray[np.int64], words: NDArray[np.int64], layouts: Iterable[Layout]) -> tuple[ItemView, int]:
    """The arrays of the item whose words begin at slot words[0], and how many of `words`, ascending slots, are its."""
    start = int(words[0])
    name = int(ids[start])
    if is_name_word(name):
        second = int(ids[words[1]]) if len(words) > 1 else None
        if second is not None and not is_name_word(second):
            return attach(Ref.from_words(name, second)), 2
        return attach(Ref.from_words(name, None)), 1
    if not is_segment_word(name):
        raise CorruptReference(f"slot {start} holds {name}, which is neither a token id nor a name word")
    stop = start
    while stop < len(ids) and ids[stop] < 0:
        stop += 1
    return attach_words(ids[start:stop].tolist(), layouts), stop - start


def plain_ids(ids: NDArray[np.int64], items: Sequence[MediaItem]) -> NDArray[np.int64]:
    """`ids` with every word replaced by the placeholder id on which it stands."""
    plain = ids.copy()
    for item in items:
        plain[item.slots if item.placeholders is None else item.placeholders] = item.shape.token
    return plain


def splice(hidden: Tensor, splices: Sequence[Splice], *, add: bool = False) -> Tensor:
    """Overwrites rows of `hidden` [T, width] in place, or adds to them, and returns it.

    Of features that are wider the first columns are taken.
    """
    for piece in splices:
        features = piece.features[:, : hidden.shape[1]].to(hidden.dtype)
        first, last = int(piece.rows[0]), int(piece.rows[-1]) + 1
        if last - first == len(piece.rows):
            target = hidden[first:last]
            target.add_(features) if add else target.copy_(features)
            continue
        rows = upload(piece.rows, hidden.device)
        hidden.index_add_(0, rows, features) if add else hidden.index_copy_(0, rows, features)
    return hidden
