"""Finding media in flat ids by their words, and overwriting hidden states with a tower's features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import CorruptReference, FeatureCountMismatch
from mindie_mm.inputs import Kind
from mindie_mm.nn.mindie import Layout, attach_words
from mindie_mm.shm import Ref, View, attach, is_name_word
from mindie_mm.shm.mindie import SegmentsRef, SegmentsView, is_segment_word

ItemRef = Ref | SegmentsRef
ItemView = View | SegmentsView
"""An item's arrays, read-only and in place, whichever wire its words are of."""


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What a block's arrays are to the model: a family reads it off a view."""

    kind: Kind
    token: int
    """The placeholder id under the words."""
    num_features: int
    """Features that the tower will give."""
    grid: tuple[int, ...]
    """The family's own geometry, such as patches (t, h, w)."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One media item in one sequence's ids."""

    start: int
    """First slot of its run."""
    stop: int
    """Slot behind the run."""
    view: ItemView
    """Its arrays; once attached, they outlive the file that they lie in."""
    shape: MediaShape

    @property
    def ref(self) -> ItemRef:
        """What the words refer to: two items of one ref have the same features, as long as either is held."""
        return self.view.ref

    @property
    def digest(self) -> bytes | None:
        """Names the content: two items with one digest have the same features. None: never cached."""
        return self.view.digest


@dataclass(frozen=True, slots=True)
class Splice:
    """Features that replace rows of a flat batch's hidden states."""

    start: int
    """First row."""
    features: Tensor
    """[rows, hidden]."""


def read_media(
    ids: NDArray[np.int64], describe: Callable[[ItemView], MediaShape], layouts: Iterable[Layout] = ()
) -> list[MediaItem]:
    """The media items of one sequence's ids int64 [T], in order; on MindIE's wire they have one of `layouts`.

    CorruptReference for a negative id that is no word, or a run that its words do not head; StaleReference and
    SegmentMissing as `attach`; FeatureCountMismatch, with both numbers, where a run is not as long as its features.
    """
    items: list[MediaItem] = []
    behind = 0
    for start in np.flatnonzero(ids < 0).tolist():
        if start < behind:
            continue
        view, behind = _attach(ids, start, layouts)
        shape = describe(view)
        view.verify()
        stop = behind
        while stop < len(ids) and ids[stop] == shape.token:
            stop += 1
        if stop - start != shape.num_features:
            raise FeatureCountMismatch(
                f"the {shape.kind} at slot {start} has {stop - start} slots, its features are {shape.num_features}"
            )
        items.append(MediaItem(start, stop, view, shape))
    return items


def _attach(ids: NDArray[np.int64], start: int, layouts: Iterable[Layout]) -> tuple[ItemView, int]:
    """The arrays of the item whose words begin at `start`, and the slot behind them."""
    name = int(ids[start])
    if is_name_word(name):
        behind = int(ids[start + 1]) if start + 1 < len(ids) else 0
        if behind < 0 and not is_name_word(behind):
            return attach(Ref.from_words(name, behind)), start + 2
        return attach(Ref.from_words(name, None)), start + 1
    if not is_segment_word(name):
        raise CorruptReference(f"slot {start} holds {name}, which is neither a token id nor a name word")
    stop = start
    while stop < len(ids) and ids[stop] < 0:
        stop += 1
    return attach_words(ids[start:stop].tolist(), layouts), stop


def plain_ids(ids: NDArray[np.int64], items: Sequence[MediaItem]) -> NDArray[np.int64]:
    """`ids` with every word replaced by the placeholder id on which it stands."""
    plain = ids.copy()
    for item in items:
        plain[item.start : item.stop] = item.shape.token
    return plain


def splice(hidden: Tensor, splices: Sequence[Splice]) -> Tensor:
    """Overwrites rows of `hidden` [T, hidden] in place, and returns it."""
    for piece in splices:
        hidden[piece.start : piece.start + piece.features.shape[0]] = piece.features.to(hidden.dtype)
    return hidden
