"""The prompt that the engine gets: flat int64 ids, with the runs of its media items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import CorruptReference
from mindie_mm.inputs import Kind
from mindie_mm.shm import Ref

Side = Literal["left", "right"]


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """The half-open range of ids that one media item's runs take.

    The range includes the slots of the item and ids between them, such as the ends of rows. In some families, runs
    begin with a start token. The first slot then comes after `start`.
    """

    start: int
    """First id."""
    stop: int
    """One past the last id."""
    kind: Kind
    token: int
    """Placeholder id. Every slot in the span that holds this id or a word takes a feature."""
    lead: int = 0
    """Number of ids directly before the span that belong to the item, such as a start token."""
    tail: int = 0
    """Number of ids directly after the span that belong to the item, such as an end token."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids with words in place, and the spans of the words' items."""

    ids: NDArray[np.int64]
    """int64 [T]. The first slots of each span that take a feature hold the words of the item."""
    spans: tuple[MediaSpan, ...] = ()
    """Spans of the media items, in order and disjoint."""
    opening: tuple[int, int] = (0, 0)
    """Range [start, stop) of ids that begin every prompt's text, such as a BOS. Only `truncate` uses it, and it is not
    sent to other processes."""

    @property
    def plain_ids(self) -> NDArray[np.int64]:
        """int64 [T], with every word replaced by the placeholder id of its slot."""
        ids = self.ids.copy()
        for span in self.spans:
            own = ids[span.start : span.stop]
            own[own < 0] = span.token
        return ids

    def refs(self) -> Iterator[Ref]:
        """Yield the block of each media item, in order, on the native wire. Raise CorruptReference."""
        for span in self.spans:
            own = self.ids[span.start : span.stop]
            words = own[own < 0][:2].tolist()
            if not words:
                raise CorruptReference(f"the {span.kind} at slot {span.start} has no word")
            yield Ref.from_words(words[0], words[1] if len(words) > 1 else None)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of a prompt: its length, its special tokens, and the sharing of its cached media."""

    max_prompt_tokens: int = 0
    """Maximum number of tokens, or 0 for no limit. A longer prompt raises ContextLengthExceeded before any media is
    preprocessed."""
    truncate: bool = False
    """Shorten a longer prompt by its oldest text and whole media items, instead of refusing it."""
    cache_salt: str = ""
    """Salt of the digests of media. Prompts with different salts share no cached media."""
    add_special_tokens: bool = True
    """Add special tokens of the tokenizer or family, such as BOS, to a text without media and without a template."""
    repeat_special_tokens: bool = False
    """Add the tokenizer's special tokens to a chat even if its template has written a BOS."""
    cut_to: int = 0
    """Number of tokens to which a longer prompt is cut. 0: it is not cut. -1: `max_prompt_tokens`. In contrast to
    `truncate`, exactly as many tokens stay, and the cut must not go through a media item."""
    cut_side: Side = "left"
    """Side from which tokens are cut off."""


def put_words(prompt: Prompt, words: Iterable[Sequence[int]]) -> Prompt:
    """Return `prompt` with the words of each item in the first slots of its span, as many as there are slots."""
    ids = prompt.ids.copy()
    for span, item_words in zip(prompt.spans, words, strict=True):
        own = ids[span.start : span.stop]
        slots = np.flatnonzero(own == span.token)[: len(item_words)]
        own[slots] = item_words[: len(slots)]
    return Prompt(ids, prompt.spans, prompt.opening)
