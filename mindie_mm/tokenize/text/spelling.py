"""What a caller's texts spell like control tokens: told apart from what is meant, while both are one string.

Before a prompt is put together, the first character of any such spelling is replaced by a private-use character that
occurs nowhere else. What spells a control token afterwards is meant; the rest is put back by `Rendered.restore`.

That is so of a template that writes each of the caller's strings whole, or without the blanks around it. One that takes
a string apart and joins the pieces, or changes its letters, can make a token of it; so can one of a caller's number, or
of a name that it looks for itself, such as "object", and writes within a token that it began.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from mindie_mm.errors import InputError

_FREE = range(0xE000, 0x110000)
"""Characters that may stand for others, private use first."""
_FIELDS = re.compile("[%{]")
"""Where a template's string may be the format of others."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as one string, control tokens spelled out."""

    text: str
    restore: Mapping[int, str]
    """From private-use characters to those that they stand for, for str.translate; empty where nothing was replaced."""
    items: Sequence[tuple[int, int]] = ()
    """Where in `text` each media item is spelled, [start, stop)."""


@dataclass(frozen=True, slots=True)
class Escapes:
    """The characters that are replaced in one prompt's texts, mostly none."""

    _spelling: ControlSpelling
    _replacements: Mapping[str, str]

    def apply(self, value: Any) -> Any:
        """`value`, which JSON could hold, with all of its strings escaped."""
        if not self._replacements:
            return value
        if isinstance(value, str):
            characters = list(value)
            for at in self._spelling.places(value):
                characters[at] = self._replacements[value[at]]
            return "".join(characters)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(entry) for entry in value]
        return value

    def rendered(self, text: str) -> Rendered:
        """A prompt of what `apply` gave."""
        return Rendered(text, {ord(replacement): original for original, replacement in self._replacements.items()})


def unused_character(texts: Sequence[str]) -> str:
    """Return a private-use character that is in none of the texts. Raise InputError if they have all of them."""
    taken = set().union(*texts)
    for character in map(chr, reversed(_FREE)):
        if character not in taken:
            return character
    raise InputError(f"the texts have all {len(_FREE)} characters from U+{_FREE[0]:X} on; one has to be left")


class ControlSpelling:
    """How a tokenizer's control tokens are spelled."""

    def __init__(self, control: Sequence[str], words: Collection[str] = ()) -> None:
        """`control` are the tokens' texts, the longest first; `words` what a template writes itself, or names.

        Where one of the words ends with the beginning of a token, as nearly no template's do, a caller's text that
        would go on with any token is replaced, too. One that is a word, and a name, is not: the template may look for
        it.
        """
        beginnings = {token[:size] for token in control for size in range(1, len(token))}
        self._pattern = _pattern(control, beginnings)
        self._names = frozenset(filter(str.isidentifier, words))
        written = (piece.rstrip() for word in words for piece in _FIELDS.split(word))
        begins = any(piece.endswith(tuple(beginnings)) for piece in written)
        rests = {token[size:].lstrip() for token in control for size in range(1, len(token))} - {""}
        self._rests = tuple(rests) if begins else ()
        self._control = "\n".join(control)

    def escapes(self, texts: Iterable[str], template: str = "") -> Escapes:
        """Replaces each character that begins a spelling in `texts` by one that neither they nor `template` have.

        InputError if these have every character that there is.
        """
        texts = list(texts)
        spelled = sorted({text[at] for text in texts for at in self.places(text)})
        taken = set().union(*texts, template) if spelled else ()
        free = (character for character in map(chr, _FREE) if character not in taken)
        replacements = dict(zip(spelled, free, strict=False))
        if len(replacements) < len(spelled):
            raise InputError(f"the texts have all {len(_FREE)} characters from U+{_FREE[0]:X} on; one has to be left")
        return Escapes(self, replacements)

    def places(self, text: str) -> Iterator[int]:
        """Where in a caller's `text` a character is to be replaced; one place may come twice."""
        yield from (match.start() for match in self._pattern.finditer(text))
        if self._rests and text not in self._names and self._goes_on(text.strip()):
            yield len(text) - len(text.lstrip())

    def _goes_on(self, text: str) -> bool:
        """Whether `text` begins with the rest of a token, or is a part of one, behind which something else goes on."""
        return text != "" and (text.startswith(self._rests) or text in self._control)


def strings(value: Any) -> Iterator[str]:
    """All strings in a value that JSON could hold, keys too, in any order. InputError if it could not."""
    waiting = [value]  # one generator in another would take each string through all of them
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif not isinstance(value, (int, float, NoneType)):  # a template could write any other as a text, unescaped
            raise InputError(f"a chat template is given what JSON can hold, not {type(value).__name__}")


def _pattern(control: Sequence[str], beginnings: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each control token, and of an incomplete one at the end of a text.

    An incomplete token, perhaps before blanks that a template strips, would become a token if the template appended
    the rest of it.
    """
    ends = "|".join(map(re.escape, sorted(sorted(beginnings), key=len, reverse=True)))
    tokens = "|".join(map(re.escape, control))
    first = "".join(sorted({re.escape(token[0]) for token in control}))
    return re.compile(rf"(?=(?:{tokens})|(?:{ends or '(?!)'})\s*\Z)[{first}]")
