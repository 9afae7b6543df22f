"""Encoding of a prompt whose texts spell control tokens, in one piece.

The vocabulary of a prompt's intended control tokens and the vocabulary of its texts must differ. Therefore, a copy of
the tokenizer knows each control token under a secret name, with the same flags. The intended control tokens are written
with these names. All other text stays unchanged and cannot produce a control token. The copy shares the model and costs
hardly any memory.

A prompt that is cut at its control tokens, and encoded piece by piece, would get other ids. A tokenizer may treat the
beginning of the text differently from the text after a control token (Metaspace with `prepend_scheme` "first"), and
control tokens may remove whitespace beside them (`lstrip`, `rstrip`).
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tokenizers import AddedToken, Tokenizer

from mindie_mm.errors import InputError

_UNASSIGNED = "\U0010fffd"
"""A character of the private use area, which is in no vocabulary."""


class Encoding(Protocol):
    """A prompt as ids, with the attributes of an encoding of the `tokenizers` library."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Range [start, stop) of the characters of each id."""


@dataclass(frozen=True, slots=True)
class _Sealed:
    """An encoding of the copy, with the ids and characters of the prompt."""

    ids: Sequence[int]
    places: Sequence[tuple[int, int]]
    """Range of the written characters of each id."""
    place: Callable[[int], int]
    """Function from the number of a written character to that of a character of the prompt."""

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        return [(self.place(start), self.place(stop)) for start, stop in self.places]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a prompt, as it is written for the tokenizer."""

    written: str
    num_chars: int
    """Number of characters of the prompt that `written` stands for."""
    is_text: bool = False


class SealedTokenizer:
    """A copy of a tokenizer, whose control tokens have secret names."""

    def __init__(self, tokenizer: Tokenizer, control_ids: Mapping[str, int], never_text: Iterable[int]) -> None:
        """Copy `tokenizer`.

        Args:
            tokenizer: The tokenizer, whose model is shared.
            control_ids: Ids of the control tokens, by text.
            never_text: Control tokens that no text may produce.

        """
        self._tokenizer = tokenizer
        self._control_ids = control_ids
        self._never_text = frozenset(never_text)
        # Characters outside the vocabulary become these tokens, one of which may be a control token, such as <unk>.
        self._unknown = {token.id for token in tokenizer.model.tokenize(_UNASSIGNED)}
        self._control = re.compile("|".join(map(re.escape, sorted(control_ids, key=len, reverse=True))) or "(?!)")
        # Neither normalizers nor neighboring characters change a name: no character of it has a composed form.
        secret = secrets.token_hex(8)
        self._cut = f"|{secret}|"
        self._names = {text: f"|{secret}#{number}|" for number, text in enumerate(control_ids)}
        self._copy, self._id_of = self._copied({})
        unseen = {text: False for text, name in self._names.items() if not self._recognizes(text, name)}
        if unseen:  # the normalizer writes something before each text, such as a space, and so before a name
            self._copy, self._id_of = self._copied(unseen)

    def encode(self, pieces: Sequence[str]) -> Encoding:
        """Encode a prompt that was split at its control tokens.

        Args:
            pieces: Texts, and at odd indices the control tokens between them.

        Raises:
            InputError: A character of the text produces a control token.

        """
        segments = [
            _Segment(self._names[piece], len(piece)) if index % 2 else _Segment(piece, len(piece), is_text=True)
            for index, piece in enumerate(pieces)
        ]
        sealed, made = self._encoded(segments, self._never_text)
        if made:
            # The vocabulary of a Unigram model includes its control tokens, so the model finds them in text. Each is
            # cut after its first character.
            sealed, made = self._encoded([*self._cut_at(segments, made)], self._never_text - self._unknown)
        if made:
            text = "".join(pieces)[made[0] : made[0] + 1]
            raise InputError(f"the text contains the character {text!r}, which becomes a control token; remove it")
        return sealed

    def _encoded(self, segments: Sequence[_Segment], never: Container[int]) -> tuple[_Sealed, list[int]]:
        """Encode a prompt. Return the encoding, and the offsets of tokens in `never` that text has produced."""
        encoding = self._copy.encode("".join(segment.written for segment in segments), add_special_tokens=False)
        written = [0, *accumulate(len(segment.written) for segment in segments)]
        chars = [0, *accumulate(segment.num_chars for segment in segments)]

        def place(at: int) -> int:
            index = bisect_right(written, at) - 1
            return chars[-1] if index == len(segments) else min(chars[index] + at - written[index], chars[index + 1])

        found = [*zip(encoding.ids, encoding.offsets, strict=True)]
        made = [place(at) for index, (at, _) in found if index in never and index not in self._id_of]
        kept = [(own, span) for index, span in found for own in self._id_of.get(index, (index,))]
        return _Sealed([own for own, _ in kept], [span for _, span in kept], place), made

    def _cut_at(self, segments: Sequence[_Segment], made: Sequence[int]) -> Iterator[_Segment]:
        """Cut the texts after each character in `made`, and after the first character of each spelled control token."""
        at = 0
        for segment in segments:
            if not segment.is_text:
                yield segment
            else:
                inside = {start - at for start in made} | {
                    found.start() for found in self._control.finditer(segment.written)
                }
                stops = sorted({start + 1 for start in inside if 0 <= start < segment.num_chars} | {segment.num_chars})
                start = 0
                for stop in stops:
                    yield _Segment(segment.written[start:stop], stop - start, is_text=True)
                    if stop < segment.num_chars:
                        yield _Segment(self._cut, 0)
                    start = stop
            at += segment.num_chars

    def _recognizes(self, text: str, name: str) -> bool:
        """Return whether the copy finds a control token directly after a letter."""
        ids = self._copy.encode(f"a{name}a", add_special_tokens=False).ids
        return (self._control_ids[text],) in [self._id_of.get(index) for index in ids]

    def _copied(self, normalized: Mapping[str, bool]) -> tuple[Tokenizer, Mapping[int, tuple[int, ...]]]:
        """Return the copy of the tokenizer, and a mapping from its added ids to ids of the original.

        Args:
            normalized: Flag `normalized` of control tokens whose copy has another one than the original.

        """
        copy = Tokenizer(self._tokenizer.model)
        copy.normalizer = self._tokenizer.normalizer
        copy.pre_tokenizer = self._tokenizer.pre_tokenizer
        copy.post_processor = self._tokenizer.post_processor
        added: dict[str, tuple[int, AddedToken]] = {}
        for index, token in sorted(self._tokenizer.get_added_tokens_decoder().items()):
            added[token.content] = (index, token)
        names: dict[str, tuple[int, ...]] = {self._cut: ()}
        tokens = [AddedToken(self._cut, normalized=False)]
        for text, index in self._control_ids.items():
            token = added.pop(text, (index, AddedToken(text, normalized=False)))[1]
            names[self._names[text]] = (index,)
            tokens.append(
                AddedToken(
                    self._names[text],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=normalized.get(text, token.normalized),
                )
            )
        for text, (index, token) in added.items():
            names[text] = (index,)
            tokens.append(token)
        copy.add_tokens(tokens)
        known = copy.get_added_tokens_decoder().items()
        return copy, {index: names[token.content] for index, token in known}
