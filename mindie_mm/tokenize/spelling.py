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
from itertools import count
from typing import Any

_FIRST_PRIVATE_USE = 0xE000


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


class ControlSpelling:
    """How a tokenizer's control tokens are spelled."""

    def __init__(self, control: Sequence[str], words: Collection[str] = ()) -> None:
        """`control` are the tokens' texts, the longest first; `words` what a template writes itself, or names.

        A caller's text that is one of the words, and a name, is not taken for the rest of a token: the template may
        look for it.
        """
        self._pattern = _pattern(control)
        self._names = frozenset(filter(str.isidentifier, words))
        self._rest = _rest_pattern(control, frozenset(words))

    def escapes(self, texts: Iterable[str], template: str = "") -> Escapes:
        """Replaces each character that begins a spelling in `texts` by one that neither they nor `template` have."""
        texts = list(texts)
        spelled = {text[at] for text in texts for at in self.places(text)}
        taken = set().union(*texts, template) if spelled else ()
        free = (chr(code) for code in count(_FIRST_PRIVATE_USE) if chr(code) not in taken)
        return Escapes(self, dict(zip(sorted(spelled), free, strict=False)))

    def places(self, text: str) -> Iterator[int]:
        """Where in a caller's `text` a character is to be replaced; one place may come twice."""
        yield from (match.start() for match in self._pattern.finditer(text))
        if self._rest and text not in self._names and (match := self._rest.match(text)):
            yield match.start(1)


def strings(value: Any) -> Iterator[str]:
    """All strings in a value that JSON could hold, keys too, in any order."""
    waiting = [value]  # one generator in another would take each string through all of them
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value


def _pattern(control: Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of each control token in a text, and of what its end may begin.

    The latter, with any blanks behind it that a template may strip, would become a token if the template put the
    right text behind it.
    """
    prefixes = {token[:size] for token in control for size in range(1, len(token))}
    ends = "|".join(map(re.escape, sorted(prefixes, key=len, reverse=True)))
    tokens = "|".join(map(re.escape, control))
    first = "".join({re.escape(token[0]) for token in control})
    return re.compile(rf"(?=(?:{tokens})|(?:{ends or '(?!)'})\s*\Z)[{first}]")


def _rest_pattern(control: Sequence[str], words: Collection[str]) -> re.Pattern[str] | None:
    """Matches a text that would go on with a control token begun by `words`; group 1 is its first character.

    None where the words begin none, as nearly every template's. The text may end within the token: what the template
    writes behind it, or another text, would go on.
    """
    prefixes = {token[:size] for token in control for size in range(1, len(token))}
    longest = max(map(len, prefixes), default=0)
    tails = {written[-size:] for word in words for written in (word, word.rstrip()) for size in range(1, longest + 1)}
    begun: set[str] = set()
    for prefix in sorted(prefixes, key=len):
        behind = (at for at in range(1, len(prefix)) if prefix[at:] in words)
        if prefix in tails or any(prefix[:at] in begun for at in behind):
            begun.add(prefix)
    rests = {token[size:].lstrip() for token in control for size in range(1, len(token)) if token[:size] in begun}
    if not rests:
        return None
    parts = {rest[:size] for rest in rests for size in range(1, len(rest))}
    whole, part = ("|".join(map(re.escape, sorted(some))) or "(?!)" for some in (rests, parts))
    return re.compile(rf"\s*+(?=(?:{whole})|(?:{part})\s*\Z)(\S)")
