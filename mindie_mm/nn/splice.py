"""Finding media in flat ids by their words, and overwriting hidden states with a tower's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import CorruptReference, FeatureCountMismatch
from mindie_mm.inputs import Kind
from mindie_mm.shm import Ref, View, attach, is_name_word


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
    view: View
    """Its arrays; once attached, they outlive the arena's file."""
    shape: MediaShape

    @property
    def ref(self) -> Ref:
        """The reference that the words carry."""
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


def read_media(ids: NDArray[np.int64], describe: Callable[[View], MediaShape]) -> list[MediaItem]:
    """The media items of one sequence's ids int64 [T], in order.

    CorruptReference for a negative id that is no word, or a run that its words do not head; StaleReference and
    SegmentMissing as `attach`; FeatureCountMismatch, with both numbers, where a run is not as long as its features.
    """
    items: list[MediaItem] = []
    negative = np.flatnonzero(ids < 0).tolist()
    while negative:
        start = negative.pop(0)
        ref, behind = _reference(ids, start)
        if negative and negative[0] < behind:
            negative.pop(0)
        view = attach(ref)
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


def _reference(ids: NDArray[np.int64], start: int) -> tuple[Ref, int]:
    """The reference whose name word stands at `start`, and the slot behind its words."""
    name = int(ids[start])
    if not is_name_word(name):
        raise CorruptReference(f"slot {start} holds {name}, which is neither a token id nor a name word")
    behind = int(ids[start + 1]) if start + 1 < len(ids) else 0
    if behind < 0 and not is_name_word(behind):
        return Ref.from_words(name, behind), start + 2
    return Ref.from_words(name, None), start + 1


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
