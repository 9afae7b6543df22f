"""The prompt that the engine receives, as flat int64 ids with the spans of its media items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import CorruptReference
from mindie_mm.inputs import Kind
from mindie_mm.media.guard.caps import VideoSample
from mindie_mm.shm import Ref

Side = Literal["left", "right"]
Words = Sequence[int]
"""Handle words of one item."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """The half-open range of ids that represents a media item.

    The range includes the item's placeholders and the ids between them, such as ends of rows. In some families, the
    range begins with a start token. In this case, the first placeholder is after `start`.
    """

    start: int
    """Index of the first id."""
    stop: int
    """Index of the last id, plus one."""
    kind: Kind
    token: int
    """Placeholder id. Every position of the span with this id or a handle word receives a feature."""
    lead: int = 0
    """Number of ids directly before the span that belong to the item, such as a start token."""
    tail: int = 0
    """Number of ids directly after the span that belong to the item, such as an end token."""
    second_token: int | None = None
    """A second placeholder id, such as that of a film's audio, which handle words never replace."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids with handle words, and the spans of the media items."""

    ids: NDArray[np.int64]
    """int64 [T]. In each span, the first placeholders are replaced with the item's handle words."""
    spans: tuple[MediaSpan, ...] = ()
    """Spans of the media items, in order. They do not overlap."""
    opening: tuple[int, int] = (0, 0)
    """Range [start, stop) of the ids that begin the text of every prompt, such as BOS. Only `truncate` uses this range.
    It is not sent to other processes."""
    assistant: tuple[tuple[int, int], ...] | None = None
    """Ranges [start, stop) of the assistant's turns, with `PromptOptions.marks_assistant`. It is not sent to other
    processes."""

    @property
    def plain_ids(self) -> NDArray[np.int64]:
        """int64 [T]. Handle words are replaced with placeholder ids."""
        return _plain(self.ids, self.spans)

    def refs(self) -> Iterator[Ref]:
        """Yield a reference to the block of each media item, in order, for the native wire.

        Raise CorruptReference if an item has no handle words or damaged handle words.
        """
        return _refs(self.ids, self.spans)

    def __len__(self) -> int:
        return len(self.ids)


def _plain(ids: NDArray[np.int64], spans: Iterable[MediaSpan]) -> NDArray[np.int64]:
    ids = ids.copy()
    for span in spans:
        own = ids[span.start : span.stop]
        own[own < 0] = span.token
    return ids


def _refs(ids: NDArray[np.int64], spans: Iterable[MediaSpan]) -> Iterator[Ref]:
    for span in spans:
        own = ids[span.start : span.stop]
        words = own[own < 0][:2].tolist()
        if not words:
            raise CorruptReference(f"the {span.kind} at token {span.start} has no handle words")
        yield Ref.from_words(words[0], words[1] if len(words) > 1 else None)


class PlannedSpan(MediaSpan, frozen=True, array_like=True, kw_only=True):
    """The span of a media item that was planned from its header, without decoding it."""

    num_features: int
    """Number of features of the item."""
    num_bytes: int
    """Size of the item's preprocessed arrays in bytes."""
    digest: bytes
    """Digest of the item's content and preprocessing. The item's block has the same digest, and a block with another
    content or other settings has another one."""
    is_rgb: bool = True
    """True if Pillow reads an image as RGB. An image in another mode is converted."""
    sample: VideoSample | None = None
    """Frames that are sampled from an encoded video. None for other items."""
    written_lead: int = 0
    """Part of `lead` that is written in place of the item's marker, instead of by the chat template."""
    plan: bytes = b""
    """The item's `Plan` as MessagePack (`KnownPlan`)."""
    by_counts: bool = False
    """True if the plan may depend on the number of items of the prompt."""
    written_tail: int = 0
    """Part of `tail` that is written in place of the item's marker, instead of by the chat template."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrompt:
    """Token ids and spans of a prompt whose media were planned. They are preprocessed only if that was asked for."""

    ids: NDArray[np.int64]
    """int64 [T]. Each feature of a media item has a placeholder id. If the media were preprocessed, the first
    placeholders of each item are replaced with its handle words."""
    spans: tuple[PlannedSpan, ...] = ()
    """Spans of the media items, in order. They do not overlap."""
    first_item: int = 0
    """Number of media items that were truncated in front of the first span."""

    @property
    def plain_ids(self) -> NDArray[np.int64]:
        """int64 [T]. Handle words are replaced with placeholder ids."""
        return _plain(self.ids, self.spans)

    def refs(self) -> Iterator[Ref]:
        """Yield a reference to the block of each media item, as `Prompt.refs` does."""
        return _refs(self.ids, self.spans)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options for making a prompt."""

    max_prompt_tokens: int = 0
    """Maximum number of tokens, or 0 for no limit. ContextLengthExceeded is raised for a longer prompt before its media
    are preprocessed."""
    truncate: bool = False
    """True if a longer prompt is truncated instead: the oldest text and the oldest media items are removed."""
    is_counted: bool = False
    """True if a prompt of more tokens is accepted, because its tokens are only counted. Even then, the number of
    characters is limited."""
    cache_salt: str = ""
    """Salt of the digests of media. Prompts with different salts do not share cached media."""
    owner: bytes = b""
    """Digest of the API key of the request."""
    add_special_tokens: bool = True
    """True if special tokens of the tokenizer or family, such as BOS, are added to text without media and without a
    template."""
    parse_special: bool | None = None
    """True if the text of a prompt without a template may contain control tokens, except those of media items. If not,
    they are encoded as plain text, as in chats. None stands for the setting of the tokenizer."""
    repeat_special_tokens: bool = False
    """True if the tokenizer's special tokens are added to a chat even if its template has written a BOS."""
    like_vllm: bool = False
    """True if a chat's tokens are the same as in vLLM where it differs from transformers: it adds no special tokens to
    the text of the template, and counts the tokens of images as `Traits.alone_in_vllm` says."""
    cut_to: int = 0
    """A longer prompt is cut to this number of tokens. 0 means no cut, and -1 stands for `max_prompt_tokens`. In
    contrast to `truncate`, exactly this number of tokens is kept, and the cut must not split a media item."""
    cut_side: Side = "left"
    """Side from which tokens are cut off."""
    template: str = ""
    """Name of the chat template, if the checkpoint has several. Empty stands for the default."""
    marks_assistant: bool = False
    """Whether to locate the assistant's turns. If they cannot be located, the prompt is refused."""
    answer_items: int = 0
    """Number of items at the end of a prompt without a template that are the assistant's turn."""

    @property
    def domain(self) -> tuple[bytes, str]:
        """Trust domain of the media. No decoder process reads media of two domains."""
        return self.owner, self.cache_salt


def put_words(prompt: Prompt, words: Iterable[Words]) -> Prompt:
    """Replace the first placeholders of each span with the item's handle words. Drop words that find no placeholder."""
    ids = prompt.ids.copy()
    for span, item_words in zip(prompt.spans, words, strict=True):
        own = ids[span.start : span.stop]
        slots = np.flatnonzero(own == span.token)[: len(item_words)]
        own[slots] = item_words[: len(slots)]
    return replace(prompt, ids=ids)
