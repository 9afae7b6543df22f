"""Encoding of prompts. A user's text never produces a control token.

The checkpoint's chat template renders a prompt to one string. Without a template, the items are joined. Control tokens
that the template or a media item writes are intended. A user's text may also spell or complete a control token, and
several texts may form a control token where they are joined. These spellings must be encoded as plain text. They are
escaped before rendering (`spelling.py`), so that every control token in the string is intended.

Most prompts do not contain escapes. They are encoded as in transformers. In other prompts, the intended control tokens
get secret names, escapes are undone, and the prompt is encoded in one piece (`sealed.py`).

A prompt without a template may be written by a caller who has applied the template. Its texts may contain all control
tokens, except those of media items.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal

from mindie_mm.errors import ContextLengthExceeded, InputError, UnsupportedCheckpoint, panics_as
from mindie_mm.inputs import PROMPT, Item, Kind, Message, Text, media_of_messages
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.settings.config import ContentFormat
from mindie_mm.tokenize.placeholders import check_order
from mindie_mm.tokenize.text.chat_template import ChatTemplate, TemplateSources
from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tokenize.text.sealed import Encoding, SealedTokenizer
from mindie_mm.tokenize.text.spelling import ControlSpelling, Rendered

_ALWAYS_ENCODED = 2**18
"""Number of characters up to which a prompt is encoded at any token limit, because it may be truncated afterwards."""
_REMEMBERED = 256
"""Number of prompts whose ids are cached, because requests or rows often repeat them. Long prompts are not cached."""
_REMEMBERED_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as ids, before its media items are expanded."""

    ids: Sequence[int]
    items: Sequence[tuple[int, int]] = ()
    """For each media item, the range [start, stop) of ids that encode its spelling. Two items may share an id."""


SpecialTokens = Literal["unless_begun", "missing", "all", "none"]
"""Which of the tokenizer's special tokens, such as BOS, are added to a prompt: all unless the prompt begins with BOS,
those that the prompt does not have, all, or none."""


class TextEncoder:
    """A checkpoint's tokenizer and chat templates."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Any,
        placeholder_ids: Collection[int],
        processor: Processor,
        content_format: ContentFormat,
    ) -> None:
        """Create an encoder.

        Args:
            checkpoint: Checkpoint of the tokenizer.
            tokenizer: Fast tokenizer of transformers.
            placeholder_ids: Ids to treat as control tokens even if the tokenizer's file does not. The `control_ids` of
                the processor's placeholders are also treated as control tokens.
            processor: Processor of the checkpoint.
            content_format: Same as in `ChatTemplate`.

        Raises:
            UnsupportedCheckpoint: A placeholder id is not an added token.

        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._content_format = content_format
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        pieces = {index for placeholder in processor.placeholders.values() for index in placeholder.control_ids}
        self._control_ids = _control_ids(checkpoint, tokenizer, placeholder_ids, pieces)
        # Text outside the vocabulary is encoded as the unknown token, so text may produce that token.
        self._never_text = {*self._control_ids.values()} - {tokenizer.unk_token_id}
        self._control = _control_pattern(self._control_ids, tokenizer)
        # A marker represents an item even if it is not a token, so a user's text must not contain a marker.
        markers = {placeholder.marker for placeholder in processor.placeholders.values() if placeholder.marker}
        self._spelled = sorted(sorted(self._control_ids.keys() | markers), key=len, reverse=True)
        self._spelling = ControlSpelling(self._spelled)
        of_media = {*placeholder_ids, *pieces}
        media = markers | {text for text, index in self._control_ids.items() if index in of_media}
        self._media_ids = {self._control_ids[text] for text in media & self._control_ids.keys()}
        self._media = _one_of(frozenset(media))
        self._media_spelling = ControlSpelling([text for text in self._spelled if text in media])
        self._sources = TemplateSources.of(checkpoint, tokenizer)
        self._templates: dict[str, ChatTemplate] = {}
        self.has_template = self._template(()) is not None
        """True if the checkpoint has a chat template."""
        for_tools = self._template((), with_tools=True)
        self.chat_traits = ChatTraits() if for_tools is None else for_tools.traits
        """Traits of the template for conversations with tools."""
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._prefix, self._suffix = self._frame()
        self._bos: str | None = tokenizer.bos_token
        bos = [] if self._bos is None else [tokenizer.bos_token_id]
        self.opening: Sequence[int] = self._prefix or bos
        """Ids that the tokenizer or a chat template adds at the beginning of a prompt, such as BOS."""
        self._remembered = lru_cache(_REMEMBERED)(lambda text, items: self._encoded(Rendered(text, {}, items)))

    def check_size(self, texts: Iterable[str], max_tokens: int) -> None:
        """Raise ContextLengthExceeded if the texts have more characters than `max_tokens` of the longest tokens.

        This is checked first, because encoding needs time and memory for every character. The check also applies to
        prompts that may be truncated.
        """
        if (size := sum(map(len, texts))) > (most := max(_ALWAYS_ENCODED, max_tokens * self._longest_token)):
            raise ContextLengthExceeded(
                f"the prompt has {size} characters; the limit is {most} characters for at most {max_tokens} tokens"
            )

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text that represents control tokens in a rendered prompt."""
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def render_items(self, items: Sequence[Item | str], *, parse_special: bool) -> Rendered:
        """Join `items` without a template. A `str` is inserted unchanged, with its control tokens.

        With `parse_special`, texts may contain control tokens, except those of media items.
        """
        spelling = self._media_spelling if parse_special else self._spelling
        escapes = spelling.escapes(item.text for item in items if isinstance(item, Text))
        pieces = [escapes.apply(item.text) if isinstance(item, Text) else item for item in items]
        rendered = escapes.rendered("".join(str(piece) for piece in pieces))
        return replace(rendered, has_control_text=parse_special)

    def render_messages(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        items: Sequence[str],
        *,
        continue_final_message: bool = False,
        name: str = "",
    ) -> Rendered:
        """Render messages with the chat template. `items` are the texts that represent their media.

        With `continue_final_message`, the prompt ends with the text of the last message. `name` is
        `PromptOptions.template`.

        Raises:
            InputError: There is no chat template, or it refuses the messages.

        """
        kinds = {item.kind for item in media_of_messages(messages)} - {PROMPT}
        if (template := self._template(kinds, with_tools=bool(template_kwargs.get("tools")), name=name)) is None:
            raise InputError("the checkpoint has no chat template; give a list of items or a string")
        return template.render(
            messages, add_generation_prompt, template_kwargs, items, continue_final_message=continue_final_message
        )

    def render_turns(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], items: Sequence[str]
    ) -> list[Rendered]:
        """Return `ChatTemplate.render_turns` for messages that `render_messages` has rendered."""
        kinds = {item.kind for item in media_of_messages(messages)} - {PROMPT}
        template = self._template(kinds, with_tools=bool(template_kwargs.get("tools")))
        assert template is not None
        return template.render_turns(messages, template_kwargs, items)

    def count_markers(self, rendered: Rendered, names: frozenset[str]) -> int:
        """Return the number of media markers in a rendered prompt. `names` are all markers that the model has."""
        return len(_one_of(names | {*filter(None, [rendered.embeds_mark])}).findall(rendered.text))

    def replace_markers(
        self, rendered: Rendered, names: frozenset[str], markers: Sequence[str], texts: Sequence[str]
    ) -> Rendered:
        """Replace the media markers in a rendered prompt.

        Args:
            rendered: Prompt with markers.
            names: All markers that the model has.
            markers: Expected markers, in order. `rendered.embeds_mark` stands for embeddings of text tokens.
            texts: Replacements of `markers`, in the same order.

        Raises:
            InputError: The markers in the prompt differ from `markers`.

        """
        pieces = _one_of(names | {*filter(None, [rendered.embeds_mark])}).split(rendered.text)
        if rendered.embeds_mark and pieces[1::2] != [*markers] and sorted(pieces[1::2]) == sorted(markers):
            wants_last = pieces[1] != rendered.embeds_mark
            raise InputError(
                "a message has media and prompt_embeds, but the model's chat template writes media "
                f"{'before' if wants_last else 'after'} text; put the media {'before' if wants_last else 'after'} "
                "prompt_embeds"
            )
        check_order(pieces[1::2], markers, len(markers))
        pieces[1::2] = texts
        return replace(rendered, text="".join(pieces), items=_odd_ones(pieces))

    def replace_marker_ids(
        self, ids: Sequence[int], names: Collection[str], markers: Sequence[str], texts: Sequence[str]
    ) -> Encoded:
        """Replace the media markers in an encoded prompt like `replace_markers`. Each text is encoded separately.

        A marker that is not replaced is recognized by its control tokens, because the ids of its other text depend on
        the neighboring text.
        """
        replaced = {marker for marker, text in zip(markers, texts, strict=True) if marker != text}
        spelled = {
            name: self._marker_ids(name, whole=name in replaced) for name in sorted(names, key=len, reverse=True)
        }
        first = {own[0] for own in spelled.values()}
        pieces: list[Sequence[int]] = []
        marker_texts: list[str] = []
        behind = 0
        for at in (index for index, own in enumerate(ids) if own in first):
            here = next((name for name, own in spelled.items() if list(ids[at : at + len(own)]) == own), None)
            if here is not None and at >= behind:
                marker_texts.append(here)
                pieces += [ids[behind:at], spelled[here]]
                behind = at + len(spelled[here])
        pieces.append(ids[behind:])
        check_order(marker_texts, markers, len(markers))
        pieces[1::2] = [
            self._encoding(text).ids if marker in replaced else spelled[marker]
            for marker, text in zip(markers, texts, strict=True)
        ]
        return Encoded([index for piece in pieces for index in piece], _odd_ones(pieces))

    def _marker_ids(self, marker: str, whole: bool) -> list[int]:
        """Return the ids of a marker.

        Unless `whole` is set, return only the ids from the first to the last control token, if the marker has control
        tokens.
        """
        ids = [*self._encoding(marker).ids]
        control = {*self._control_ids.values()}
        places = [at for at, index in enumerate(ids) if index in control]
        return ids if whole or not places else ids[places[0] : places[-1] + 1]

    def encode(self, rendered: Rendered, special_tokens: SpecialTokens = "unless_begun") -> Encoded:
        """Encode a prompt, and add the tokenizer's special tokens."""
        pattern = self._media if rendered.has_control_text else self._control
        if rendered.restore:
            plain = replace(rendered, text=rendered.text.translate(rendered.restore), restore={})
            if _places(pattern, plain.text) == _places(pattern, rendered.text):  # restoring does not add a spelling
                rendered = plain
        if rendered.restore or len(rendered.text) > _REMEMBERED_CHARS:
            encoded = self._encoded(rendered)
        else:
            encoded = self._remembered(rendered.text, tuple(rendered.items))
        prefix, suffix = self._around(rendered, encoded.ids, special_tokens)
        items = [(start + len(prefix), stop + len(prefix)) for start, stop in encoded.items]
        return Encoded([*prefix, *encoded.ids, *suffix], items)

    def _around(
        self, rendered: Rendered, ids: Sequence[int], special_tokens: SpecialTokens
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the special tokens to add before and after `ids`."""
        prefix, suffix = self._prefix, self._suffix
        if special_tokens == "none":
            return [], []
        if special_tokens == "unless_begun" and self._bos and rendered.text.startswith(self._bos):
            return [], []
        if special_tokens == "missing":
            has_prefix = [*ids[: len(prefix)]] == prefix
            has_suffix = len(ids) >= len(suffix) and [*ids[len(ids) - len(suffix) :]] == suffix
            return [] if has_prefix else prefix, [] if has_suffix else suffix
        return prefix, suffix

    @cached_property
    def _sealed(self) -> SealedTokenizer:
        return SealedTokenizer(self._backend, self._control_ids, self._never_text)

    def _encoded(self, rendered: Rendered) -> Encoded:
        """Encode a prompt without the special tokens that the tokenizer adds."""
        with panics_as(InputError, "the tokenizer cannot encode the prompt"):
            encoding = None if rendered.restore else self._encoding(rendered.text)
            if encoding is None or not self._as_meant(rendered, encoding.ids):
                pieces = self._control.split(rendered.text)
                pieces[::2] = [piece.translate(rendered.restore) for piece in pieces[::2]]
                encoding = self._sealed.encode(pieces)
        offsets = encoding.offsets if rendered.items else ()
        return Encoded(encoding.ids, [_touched(offsets, *item) for item in rendered.items])

    def _as_meant(self, rendered: Rendered, ids: Sequence[int]) -> bool:
        """Return whether `ids` contain exactly the control tokens in the text. A normalizer may produce other tokens.

        If texts may contain control tokens, only those of media items are compared.
        """
        if self._backend.normalizer is None:
            return True
        compared = self._never_text & self._media_ids if rendered.has_control_text else self._never_text
        spelled = [self._control_ids[match[0]] for match in self._control.finditer(rendered.text)]
        return [i for i in spelled if i in compared] == [i for i in ids if i in compared]

    def _template(self, kinds: Collection[Kind], *, with_tools: bool = False, name: str = "") -> ChatTemplate | None:
        """Return the template for conversations with items of `kinds`, or the template `name`. None if there is none.

        Raise InputError if there is no template with this name.
        """
        sources = self._sources
        source = sources.tool_use if with_tools else None
        if name:
            source = sources.named.get(name)
            if source is None:
                known = ", ".join(sources.named)
                raise InputError(f"the checkpoint has no chat template {name!r}; its chat templates are: {known}")
        source = source or self._processor.template(sources.processor, sources.tokenizer, kinds)
        if not source:
            return None
        if source not in self._templates:
            self._templates[source] = ChatTemplate(
                source,
                self._tokenizer,
                self._spelled,
                self._content_format,
                for_tools=source == sources.tool_use and source != sources.tokenizer,
            )
        return self._templates[source]

    def _encoding(self, text: str) -> Encoding:
        self._backend.encode_special_tokens = False  # transformers may have changed it
        encoding: Encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding

    def _frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        framed = self._tokenizer.encode("a")
        start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[:start], framed[start + len(bare) :]


@lru_cache
def _one_of(names: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(sorted(names), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _control_pattern(control_ids: Mapping[str, int], tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern for all control tokens, as the group 1."""
    added = tokenizer.added_tokens_decoder
    alone = {text for text, index in control_ids.items() if index in added and added[index].single_word}
    tokens = [
        rf"(?<!\w){re.escape(text)}(?!\w)" if text in alone else re.escape(text)
        for text in sorted(sorted(control_ids), key=len, reverse=True)
    ]
    return re.compile(f"({'|'.join(tokens) or '(?!)'})")


def _places(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of the control tokens in `text`."""
    return [match.span() for match in pattern.finditer(text)]


def _control_ids(
    checkpoint: Checkpoint, tokenizer: Any, placeholder_ids: Collection[int], pieces: Collection[int]
) -> dict[str, int]:
    """Map texts of control tokens to ids. Raise UnsupportedCheckpoint if a placeholder id is not an added token."""
    added = tokenizer.added_tokens_decoder
    if missing := sorted(set(placeholder_ids) - added.keys()):
        raise UnsupportedCheckpoint(f"{checkpoint.path}: the tokenizer has no added tokens for the media ids {missing}")
    control = {token.content: index for index, token in added.items() if token.special or index in placeholder_ids}
    return control | {tokenizer.convert_ids_to_tokens(index): index for index in set(pieces) - added.keys()}


def _odd_ones(pieces: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of the pieces with odd indices in the concatenation of all pieces."""
    ends = [*accumulate(map(len, pieces))]
    return [*zip(ends[:-1:2], ends[1::2], strict=True)]


def _touched(places: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """Return the index range of the `places` that overlap [start, stop). Places are ranges in ascending order."""
    first = bisect_right(places, start, key=lambda place: place[1])
    return first, max(first, bisect_left(places, stop, key=lambda place: place[0]))
