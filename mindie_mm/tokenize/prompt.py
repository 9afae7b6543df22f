"""A prompt as the engine gets it: flat int64 ids, with the runs of its media items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindie_mm.inputs import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """The placeholder run of one media item, half-open."""

    start: int
    """First slot of the run."""
    stop: int
    """One past its last slot."""
    kind: Kind
    token: int
    """The placeholder id that every slot of the run stands for."""
    lead: int = 0
    """Ids right in front of the run that belong to the item, such as a start token."""
    tail: int = 0
    """Ids right behind the run that belong to the item, such as an end token."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids with words in place, and where the words' items lie."""

    ids: NDArray[np.int64]
    """int64 [T]; the first slots of each span hold the item's words."""
    spans: tuple[Span, ...] = ()
    """The media items, in order, apart from one another."""

    @property
    def plain_ids(self) -> NDArray[np.int64]:
        """int64 [T], every word replaced by the placeholder id on which it stands."""
        ids = self.ids.copy()
        for span in self.spans:
            ids[span.start : span.stop] = span.token
        return ids

    def __len__(self) -> int:
        return len(self.ids)


def put_words(prompt: Prompt, words: Iterable[Sequence[int]]) -> Prompt:
    """`prompt` with the words of each span on its first slots; a run that is shorter takes the first of them."""
    ids = prompt.ids.copy()
    for span, item_words in zip(prompt.spans, words, strict=True):
        room = min(len(item_words), span.stop - span.start)
        ids[span.start : span.start + room] = item_words[:room]
    return Prompt(ids, prompt.spans)
