"""Functions that find media items by their handle words, and that put features in place of placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import CorruptReference, FeatureCountMismatch
from mindie_mm.inputs import PROMPT
from mindie_mm.nn.mindie import Layout, attach_words
from mindie_mm.shm import Ref, View, attach, is_name_word
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsRef, SegmentsView, is_segment_word

ItemRef = Ref | SegmentsRef
ItemKey = bytes | ItemRef | tuple[bytes | ItemRef, str]
ItemView = View | SegmentsView
"""The arrays of an item, read-only and not copied. The type depends on the wire format of the handle words."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """A media item in the ids of one sequence."""

    slots: NDArray[np.int64]
    """Token indices whose embeddings are replaced by features, int64 [num_features], ascending."""
    view: ItemView
    """Arrays of the item. Attached arrays stay readable after their file is unlinked."""
    shape: MediaShape
    placeholders: NDArray[np.int64] | None = None
    """Token indices of the handle words and placeholders, int64 [num_features]. None means `slots`."""
    prompt_ids: NDArray[np.int64] | None = None
    """Ids of the whole prompt, int64 [T], with handle words. A segment may contain them instead of the sequence. None
    if they are not known."""
    lora: str = ""
    """Key of the LoRA adapter that changes the item's features, or an empty string."""

    @property
    def start(self) -> int:
        """The first index in `slots`."""
        return int(self.slots[0])

    @property
    def stop(self) -> int:
        """Last index in `slots`, plus one."""
        return int(self.slots[-1]) + 1

    def features_in(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range [first, last) of the features whose token indices are in [start, stop)."""
        first, last = np.searchsorted(self.slots, (start, stop)).tolist()
        return first, last

    @property
    def ref(self) -> ItemRef:
        """The reference in the handle words. Equal references mean equal features while one of the items is in use."""
        return self.view.ref

    @property
    def digest(self) -> bytes | None:
        """Digest of the content. Equal digests mean equal features. Items without a digest are never cached."""
        return self.view.digest

    def close(self) -> None:
        """Stop keeping the item's arena mapped. Arrays in MindIE's segments stay mapped."""
        if isinstance(self.view, View):
            self.view.close()

    @property
    def key(self) -> ItemKey:
        """The digest, or the reference if there is no digest. Items with equal keys have equal features."""
        key = self.ref if self.digest is None else self.digest
        return (key, self.lora) if self.lora else key


def split_features(features: Tensor, items: Sequence[MediaItem]) -> list[Tensor]:
    """Split the concatenated features [..., width] of all items into one tensor [num_features, width] per item."""
    return list(features.flatten(0, -2).split([item.shape.num_features for item in items]))


@dataclass(frozen=True, slots=True)
class Splice:
    """Features that replace rows of a flat batch's hidden states, or are added to them."""

    rows: NDArray[np.int64]
    """int64 [n], ascending."""
    features: Tensor
    """[n, hidden_size + extra_width]."""


def read_media(
    ids: NDArray[np.int64], describe: Callable[[ItemView], MediaShape], layouts: Iterable[Layout] = ()
) -> list[MediaItem]:
    """Attach the media items of one sequence.

    The handle words of an item are in its first placeholder positions. The other placeholder positions contain the
    placeholder id.

    Args:
        ids: Token ids and handle words, int64 [T].
        describe: Function that returns the shape of an item.
        layouts: Layouts that items in MindIE's wire format may have.

    Returns:
        The items in the order of the ids.

    Raises:
        CorruptReference: A negative id is not a handle word, or an item's handle words are not in its first
            placeholder positions.
        StaleReference: A block was freed or reused.
        SegmentMissing: An arena or a segment does not exist.
        FeatureCountMismatch: An item has more or fewer placeholders than features. The message gives both numbers.

    """
    items: list[MediaItem] = []
    words = np.flatnonzero(ids < 0)
    enclosed = any(layout.enclosed for layout in layouts)
    while len(words):
        view, num_words = _attach(ids, words, layouts)
        shape = describe(view)
        view.verify()
        start, rest = int(words[0]), words[num_words:]
        if enclosed and isinstance(view, SegmentsView):
            items.append(MediaItem(_enclosed_slots(ids, start, num_words, shape), view, shape, prompt_ids=ids))
            words = rest[rest >= items[-1].stop]
            continue
        end = int(rest[0]) if len(rest) else len(ids)
        own = ids[start:end]
        is_first = (own < 0) | (own == shape.token)
        first_slots = start + np.flatnonzero(is_first)
        slots = first_slots
        if shape.second_token is not None:
            slots = start + np.flatnonzero(is_first | (own == shape.second_token))
        if len(slots) != shape.num_features:
            raise FeatureCountMismatch(
                f"the {shape.kind} at token {start} has {len(slots)} placeholder tokens, but {shape.num_features} "
                "features; the numbers must be equal"
            )
        if not np.array_equal(words[:num_words], first_slots[:num_words]):
            raise CorruptReference(
                f"the handle words of the {shape.kind} at token {start} are not at its first placeholder positions"
            )
        items.append(MediaItem(slots, view, shape, prompt_ids=ids))
        words = rest
    return items


def _attach(ids: NDArray[np.int64], words: NDArray[np.int64], layouts: Iterable[Layout]) -> tuple[ItemView, int]:
    """Attach the item whose handle words begin at index words[0]. Return its arrays and its number of handle words.

    `words` contains the indices of all remaining handle words, ascending.
    """
    start = int(words[0])
    name = int(ids[start])
    if is_name_word(name):
        second = int(ids[words[1]]) if len(words) > 1 else None
        if second is not None and not is_name_word(second):
            return attach(Ref.from_words(name, second)), 2
        return attach(Ref.from_words(name, None)), 1
    if not is_segment_word(name):
        raise CorruptReference(f"the token at position {start} is {name}, which is neither a token id nor a name word")
    stop = start
    while stop < len(ids) and ids[stop] < -1:
        stop += 1
    return attach_words(ids[start:stop].tolist(), layouts), stop - start


def _enclosed_slots(ids: NDArray[np.int64], first: int, num_words: int, shape: MediaShape) -> NDArray[np.int64]:
    """Return `MediaItem.slots` of an item with the layout `enclosed`. `first` is the index of its first handle word."""
    start, stop = first - 1, first - 1 + shape.num_features
    end = first + num_words
    while end < len(ids) and ids[end] != shape.token:
        end += 1
    if start < 0 or ids[start] != shape.token:
        raise CorruptReference(f"the handle words of the {shape.kind} at token {first} do not follow a placeholder")
    if end + 1 != stop:
        raise FeatureCountMismatch(
            f"the {shape.kind} at token {start} has {end + 1 - start} tokens, but {shape.num_features} features; the "
            "numbers must be equal"
        )
    if (ids[first + num_words : end] < -1).any():
        raise CorruptReference(f"the {shape.kind} at token {start} contains handle words of another item")
    return np.arange(start, stop)


def without_prompt_embeds(items: Sequence[MediaItem]) -> list[MediaItem]:
    """Return the items that are media. Positions and attention of embeddings of text tokens are those of text."""
    return [item for item in items if item.shape.kind != PROMPT]


def plain_ids(ids: NDArray[np.int64], items: Sequence[MediaItem]) -> NDArray[np.int64]:
    """Return a copy of `ids` in which the placeholder ids of `items` replace all handle words."""
    plain = next((item.prompt_ids for item in items if item.prompt_ids is not None), ids).copy()
    for item in items:
        places = item.slots if item.placeholders is None else item.placeholders
        plain[places if item.shape.second_token is None else places[plain[places] < 0]] = item.shape.token
    return plain


def splice(hidden: Tensor, splices: Sequence[Splice], *, add: bool = False) -> Tensor:
    """Overwrite rows of hidden states with features, or add the features to them.

    Args:
        hidden: Hidden states, [T, width], changed in place.
        splices: Features with their rows. Only the first `width` columns of the features are used.
        add: Whether to add features instead of overwriting rows.

    Returns:
        `hidden`.

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
